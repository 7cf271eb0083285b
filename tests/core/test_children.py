"""A child process runs our code, and none from the folder that somebody stands in."""

import json
import pickle
import sys

import pytest

from tightlip.core.children import begin_child


@pytest.mark.parametrize("is_interactive", [False, True])
def test_a_model_folder_that_one_stands_in_runs_no_code(is_interactive, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    if is_interactive:  # where an empty entry is whatever folder one stands in
        monkeypatch.setattr(sys, "path", ["", *sys.path])
    for module in ("jinja2", "transformers", "json", "numpy", "tightlip"):
        (tmp_path / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    child = begin_child("tightlip.corpus.rendering")
    asked = {"template": "{{ messages[0].role }}", "date": "2026-01-02", "values": {}}
    chat = {"messages": [{"role": "user", "content": ""}]}
    answers, _ = child.communicate("".join(f"{json.dumps(a)}\n" for a in (asked, chat)).encode())
    assert json.loads(answers.splitlines()[-1])["text"] == "user"
    assert not ran.exists()


def test_what_is_printed_in_a_child_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('True', flush=True)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    child = begin_child("tightlip.core.children")
    answers, _ = child.communicate(pickle.dumps(len) + pickle.dumps("four"))
    assert pickle.loads(answers) == (True, 4)
