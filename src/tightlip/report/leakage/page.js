// Tables that sort, filter and open. Texts come from strangers: they only ever become text nodes.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const PAGE = 25;
  const hasRatios = byId("sequence-table") !== null && !byId("sequence-table").hasAttribute("data-no-ratio");

  // JSON has no infinity: such numbers arrive as words.
  const known = (value) => (value === null ? null : Number(value));

  const make = (tag, className, ...children) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children.filter((child) => child !== null));
    return node;
  };

  const whole = new Intl.NumberFormat("en");
  const measured = (value) => {
    if (value === null) return "–";
    if (Number.isNaN(value)) return "not a number";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
    if (value >= 1e9) return value.toExponential(1);
    if (value >= 100) return whole.format(Math.round(value));
    if (value >= 10) return value.toFixed(1);
    return value >= 0.1 || value === 0 ? value.toFixed(2) : value.toPrecision(2);
  };
  const share = (value) => (value === null ? "–" : value >= 0.001 || value === 0 ? (100 * value).toFixed(1) + "%" : "under 0.1%");
  const tokens = (n) => (n === 1 ? "1 token" : whole.format(n) + " tokens");
  const times = (n) => (n === 1 ? "once" : n === 2 ? "twice" : whole.format(n) + " times");
  const people = (n) => (n === 1 ? "1 person" : whole.format(n) + " people");

  // What cannot be seen, or would turn the line around, is written out.
  const visible = (text) =>
    text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/g, (c) => {
      if (c === "\n") return "↵\n";
      if (c === "\t") return "⇥\t";
      return "[U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "]";
    });
  const oneLine = (text) => visible(text).replace(/\n|\t/g, " ");
  const cutNote = (n, words) => (n ? make("span", "cut", words.replace("#", whole.format(n))) : null);

  const ownerName = (place) => {
    const [name, cut] = data.owners[place];
    return oneLine(name) + (cut ? "… (" + whole.format(cut) + " characters cut)" : "");
  };

  // The places are those of rows.py.
  const listed = data.sequences.map((row, order) => ({
    order, place: row[0], text: row[1], cut: row[2], tokens: row[3], completed: row[4], usersInS: row[5], written: row[6],
    // As text where that was counted: others may have cut the same words into other tokens.
    people: row[13] === null ? row[7] : row[13], byTokens: row[7], hasWord: row[13] !== null, unique: row[14] === 1, leak: row[15],
    perplexity: known(row[8]), ratio: known(row[9]), copied: row[10] === 1, owners: row[11], occurrences: row[12],
    // Tokens that came without their chat are all "text", which tells nothing.
    role: row[16] === "text" ? null : row[16], trained: row[17], anybody: row[18] === false,
    found: row[1] === null ? "" : row[1].toLowerCase(), others: [],
  }));
  // A leak is one line, called by its longest sequence, with the worst figures and the owners of all of them.
  const asLeaks = (rows) => {
    const leaks = new Map();
    for (const row of rows.filter((one) => one.leak !== null)) {
      if (leaks.has(row.leak)) leaks.get(row.leak).push(row);
      else leaks.set(row.leak, [row]);
    }
    const head = (all) => all.find((one) => one.place === one.leak) || all[0];
    const worst = (pick, values) => (values.some((value) => value !== null) ? pick(...values.filter((value) => value !== null)) : null);
    return rows.filter((row) => row.leak === null || row === head(leaks.get(row.leak))).map((row) => {
      const all = row.leak === null ? [row] : leaks.get(row.leak);
      return all.length === 1 ? row : {
        ...row, others: all.filter((one) => one !== row), copied: all.every((one) => one.copied), anybody: all.every((one) => one.anybody), found: all.map((one) => one.found).join("\n"),
        owners: [...new Set(all.flatMap((one) => one.owners))], ratio: worst(Math.max, all.map((one) => one.ratio)), perplexity: worst(Math.min, all.map((one) => one.perplexity)),
      };
    });
  };
  const sequences = asLeaks(listed).map((row) => ({ ...row, owner: row.owners.map((place) => data.owners[place][0]).join(" · ") || null }));
  const users = data.users.map((row, order) => ({
    order, ownerPlace: row[0], user: data.owners[row[0]][0], documents: row[1], tokens: row[2], unique: row[3],
    leaked: row[4], longest: row[5], ratio: known(row[6]), leaks: row[7], share: row[2] ? row[4] / row[2] : null,
  }));

  // Unknown values stay last whichever way the rest is turned; ties keep the report's order.
  const sorted = (rows, key, down) => {
    const missing = (value) => value === null || Number.isNaN(value);
    return [...rows].sort((a, b) => {
      const x = a[key], y = b[key];
      if (missing(x) || missing(y)) return missing(x) - missing(y) || a.order - b.order;
      if (x === y) return a.order - b.order;
      return (x < y ? -1 : 1) * (down ? -1 : 1);
    });
  };

  const cell = (className, label, ...children) => {
    const node = make("td", className, ...children);
    node.setAttribute("role", "cell");
    if (label) node.dataset.label = label;
    return node;
  };

  class DataTable {
    constructor(table, rows, draw, more, key) {
      Object.assign(this, { table, rows, draw, more, key, down: true, shown: PAGE, keep: () => true, changed: () => {} });
      this.body = table.tBodies[0];
      this.heads = [...table.querySelectorAll("th[data-key]")];
      for (const head of this.heads) {
        head.querySelector("button").addEventListener("click", () => this.sortBy(head.dataset.key));
      }
      more.addEventListener("click", () => {
        const from = this.shown;
        this.shown += 2 * PAGE;
        this.append(from);
      });
    }
    sortBy(key) {
      const words = key === "owner" || key === "user";
      this.down = this.key === key ? !this.down : !words;
      this.key = key;
      this.refresh();
    }
    refresh() {
      this.shown = PAGE;
      this.visible = sorted(this.rows.filter(this.keep), this.key, this.down);
      for (const head of this.heads) {
        const here = head.dataset.key === this.key;
        head.setAttribute("aria-sort", here ? (this.down ? "descending" : "ascending") : "none");
      }
      this.body.replaceChildren();
      this.append(0);
    }
    append(from) {
      this.body.append(...this.visible.slice(from, this.shown).map(this.draw));
      const left = this.visible.length - this.shown;
      this.more.hidden = left <= 0;
      this.more.textContent = "Show " + whole.format(Math.min(left, 2 * PAGE)) + " more";
      this.changed(this.visible.length, Math.min(this.shown, this.visible.length));
    }
  }

  // Of a chat: whose words these sequences are, and whether none of them was trained on.
  const said = (rows) => [...new Set(rows.map((row) => row.role))].filter((role) => role !== null)
    .concat(rows.every((row) => row.trained === false) ? ["not trained on"] : []);

  const textOf = (row) => (row.text === null ? tokens(row.tokens) : oneLine(row.text).trim() || "(empty)");

  const drawSequence = (row) => {
    const words = make("bdi", "", textOf(row));
    words.dir = "auto";
    const clip = make("span", "clip", words, row.cut ? "…" : null);
    const more = row.others.length;
    const tags = make("span", "tags", row.copied ? make("span", "tag", "copied") : null,
      row.anybody && row.unique ? make("span", "tag quiet", "anybody would say it") : null,
      ...said([row, ...row.others]).map((words) => make("span", "tag quiet", words)),
      more ? make("span", "tag quiet", "and " + whole.format(more) + (more === 1 ? " sequence" : " sequences") + " within or across it") : null);
    const open = make("button", "", make("span", "", clip, tags.hasChildNodes() ? tags : null));
    open.type = "button";
    open.setAttribute("aria-expanded", "false");
    const owner = cell("owner", ["", "owner"][row.owners.length] ?? "owners");
    row.owners.forEach((place, number) => {
      const who = make("bdi", "who", ownerName(place));
      who.title = ownerName(place);
      owner.append(number ? "\u00a0· " : "", who);
    });
    const line = make("tr", "row opens", cell("text", "", open),
      cell("", "tokens", whole.format(row.tokens)), cell("ratio", "ratio", measured(row.ratio)),
      cell("", "perplexity", measured(row.perplexity)), cell("", "completed", whole.format(row.completed)),
      cell("", "written", whole.format(row.written)), cell("", "people", whole.format(row.people)), owner);
    line.setAttribute("role", "row");
    line.addEventListener("click", (event) => {
      // Marking words with the mouse ends in a click too.
      if (event.detail > 0 && String(getSelection()) && line.contains(getSelection().anchorNode)) return;
      const opened = line.classList.toggle("open");
      open.setAttribute("aria-expanded", String(opened));
      if (opened) line.after(drawDetail(row));
      else line.nextSibling.remove();
    });
    return line;
  };

  const drawDetail = (row) => {
    const often = row.written === 1 ? "Completed the one time it is written"
      : "Completed " + times(row.completed) + "; written " + times(row.written);
    const whose = row.byTokens === 1 ? (row.unique ? "" : ", in these tokens") + ", always by one person." : (row.unique ? " in texts of " : " by ") + people(row.byTokens) + ", completed for " + people(row.usersInS) + ".";
    const inside = cell("", "", make("p", "about", often + (row.written === 1 ? "." : whose)));
    inside.colSpan = hasRatios ? 8 : 7;
    if (row.byTokens === 1 && !row.unique) {
      inside.append(make("p", "about", row.hasWord ? "As text " + people(row.people) + " wrote it: elsewhere it is cut into other tokens."
        : "There is no word in it, so it is not counted as anybody's own."));
    }
    if (row.copied) {
      inside.append(make("p", "about", "Copied: it already stood in a context below, so the model may have repeated it rather than remembered it."));
    }
    if (row.anybody) inside.append(make("p", "about", "The public model completes it too, every time."));
    if (row.role !== null) inside.append(make("p", "about", "Role: " + row.role + "."));
    if (row.trained === false) {
      inside.append(make("p", "about", "Not trained on: the loss left these tokens out, or training cut the row off before them."));
    }
    for (const occurrence of row.occurrences) inside.append(...drawOccurrence(row, occurrence));
    const left = row.completed - row.occurrences.length;
    if (left > 0) {
      inside.append(make("p", "about", "Completed " + times(left) + " more, in contexts not shown here."));
    }
    if (row.others.length) inside.append(...drawOthers(row));
    const line = make("tr", "detail", inside);
    line.setAttribute("role", "row");
    return line;
  };

  const drawOthers = (row) => {
    const list = make("ul", "others", ...row.others.map((one) => {
      const words = make("bdi", "", textOf(one), one.cut ? "…" : null);
      words.dir = "auto";
      const about = [...said([one]), tokens(one.tokens), "perplexity " + measured(one.perplexity)];
      if (one.ratio !== null) about.push("ratio " + measured(one.ratio));
      return make("li", "", make("mark", "", words), make("span", "about", " " + about.join(" · ")));
    }));
    return [make("p", "about", "Other sequences of this leak, which share words of a document with it or with each other:"), list];
  };

  const drawOccurrence = (row, [context, cut, contextTokens, perplexity, publicPerplexity]) => {
    const run = row.text === null ? tokens(row.tokens) : visible(row.text);
    const before = context === null ? "context: " + tokens(contextTokens || 0) : visible(context);
    const mark = make("mark", "", run);
    const shown = make("p", "context", cutNote(cut, "# characters cut … "), make("span", "before", before), context === null ? " " : null,
      mark, cutNote(row.cut, " … # characters cut"));
    if (context !== null) shown.dir = "auto";
    const ours = known(perplexity), theirs = known(publicPerplexity);
    const about = ["perplexity " + measured(ours)];
    if (theirs !== null) about.push("public model " + measured(theirs), "ratio " + measured(theirs / ours));
    if (context !== null && contextTokens !== null) about.push(contextTokens ? "after " + tokens(contextTokens) + " of context" : "at the start of a document");
    return [shown, make("p", "about", about.join(" · "))];
  };

  const drawUser = (row) => {
    const button = make("button", "", make("bdi", "who", ownerName(row.ownerPlace)));
    button.type = "button";
    button.title = "Show this person's sequences: " + ownerName(row.ownerPlace);
    const line = make("tr", "row", cell("text", "", button),
      ...(row.leaks === null ? [] : [cell("", "leaks", whole.format(row.leaks))]),
      cell("", "unique", whole.format(row.unique)), cell("", "leaked", whole.format(row.leaked)), cell("", "share", share(row.share)),
      cell("", "longest", whole.format(row.longest)), cell("ratio", "max ratio", measured(row.ratio)),
      cell("", "documents", whole.format(row.documents)), cell("", "written", whole.format(row.tokens)));
    line.setAttribute("role", "row");
    line.addEventListener("click", () => {
      byId("filters").reset();
      byId("owner").value = String(row.ownerPlace);
      filter();
      byId("sequences").scrollIntoView();
      byId("owner").focus({ preventScroll: true });
    });
    return line;
  };

  let table = null;
  const atLeast = (id) => {
    const input = byId(id);
    return input && input.value !== "" && !Number.isNaN(input.valueAsNumber) ? input.valueAsNumber : null;
  };

  function filter() {
    const [search, owner, role, trained] = ["search", "owner", "role", "trained"].map((id) => (byId(id) ? byId(id).value : ""));
    const minTokens = atLeast("min-tokens"), minRatio = atLeast("min-ratio");
    const onlyUnique = byId("only-unique").checked, hideCopied = byId("hide-copied").checked;
    table.keep = (row) =>
      (!search || row.found.includes(search.toLowerCase())) &&
      [row, ...row.others].some((one) => (!role || one.role === role) && (!trained || String(one.trained) === trained)) &&
      (minTokens === null || row.tokens >= minTokens) &&
      (minRatio === null || (row.ratio !== null && row.ratio >= minRatio)) &&
      (owner === "" || row.owners.includes(Number(owner))) &&
      (!onlyUnique || row.unique) &&
      (!hideCopied || !row.copied);
    table.refresh();
  }

  if (byId("sequence-table")) {
    table = new DataTable(byId("sequence-table"), sequences, drawSequence, byId("more"), hasRatios ? "ratio" : "tokens");
    table.changed = (matching, shown) => {
      const owner = byId("owner").value;
      const elsewhere = owner !== "" && users.find((user) => user.ownerPlace === Number(owner));
      const [num, what] = !elsewhere ? [0, ""] : elsewhere.leaks === null ? [elsewhere.unique, "sequence"] : [elsewhere.leaks, "leak"];
      const rest = num > matching ? " This person has " + whole.format(num) + " " + what + (num === 1 ? "" : "s") + " in sequences.parquet." : "";
      byId("status").textContent = (matching ? "Rows 1 to " + whole.format(shown) + " of " + whole.format(matching) + " that match." : "No row on this page matches.") + rest;
    };
    const owned = [...new Set(sequences.flatMap((row) => row.owners).concat(users.map((user) => user.ownerPlace)))];
    const options = owned.map((place) => [ownerName(place), place]);
    options.sort((a, b) => a[0].localeCompare(b[0], "en", { numeric: true }));
    byId("owner").append(...options.map(([name, place]) => new Option(name, place)));
    const roles = [...new Set(listed.map((row) => row.role))].filter((role) => role !== null).sort();
    if (roles.length) byId("role").append(...roles.map((role) => new Option(role)));
    else if (byId("role")) byId("role").parentNode.remove();
    byId("filters").addEventListener("input", filter);
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("reset", () => setTimeout(filter));
    filter();
  }
  if (byId("user-table")) {
    new DataTable(byId("user-table"), users, drawUser, byId("more-users"), byId("user-table").querySelector("[data-key=leaks]") ? "leaks" : "unique").refresh();
  }
})();
