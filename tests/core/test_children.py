"""A child process runs our code, and none from the folder that somebody stands in."""

import json

from tightlip.core.children import begin_child


def test_a_model_folder_that_one_stands_in_runs_no_code(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    for module in ("jinja2", "transformers", "json", "numpy", "tightlip"):
        (tmp_path / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    child = begin_child("tightlip.corpus.rendering")
    asked = {"template": "{{ messages[0].role }}", "date": "2026-01-02", "values": {}}
    chat = {"messages": [{"role": "user", "content": ""}]}
    answers, _ = child.communicate("".join(f"{json.dumps(a)}\n" for a in (asked, chat)).encode())
    assert json.loads(answers.splitlines()[-1])["text"] == "user"
    assert not ran.exists()
