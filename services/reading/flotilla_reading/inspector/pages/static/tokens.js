// The token view: every token of a sequence as coloured text, with its numbers under the pointer.
//
// The numbers come as typed arrays; the text is made chunk by chunk as it comes into view, and all
// event listeners are on the whole track, so an episode of 60,000 tokens opens at once.
"use strict";
(() => {
  const view = document.getElementById("token-view");
  if (!view) return;
  const track = document.getElementById("track");
  const card = document.getElementById("token-card");
  const voice = document.getElementById("token-voice");
  const legend = document.getElementById("legend");
  const status = document.getElementById("token-status");
  const AUTHORS = ["prompt", "policy", "environment", "forced"];
  const MASKS = ["not trained", "trained", "not the policy's", "not known"];
  const COLOURS = ["logprob", "difference", "advantage", "mask", "author", "version"];
  const LEAST_CHUNK = 192, MOST_CHUNK = 768;
  const LINE_PX = 20, CHARACTER_PX = 7.9, HEAD_PX = 130;
  let data, chunks, colour, current = null;

  // token_data.py documents the layout.
  function unpack(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    const { count, words } = head;
    const found = { count, parts: head.parts, runs: head.runs, left_out: head.left_out };
    // A picture's first token stands for all of its run: `first` of each token, `ends` of those.
    found.first = Int32Array.from({ length: count }, (_, i) => i);
    found.ends = new Map(head.pictures);
    for (const [start, end] of head.pictures) found.first.fill(start, start, end);
    found.words = new Int32Array(buffer, 4 + length, count);
    found.ids = words.map((word) => word[0]);
    found.texts = words.map((word) => word[1]);
    for (const name of ["logprobs", "trainer", "advantages", "entropy", "weights"]) {
      const place = head.arrays.indexOf(name);
      found[name] = place < 0 ? new Float32Array(count).fill(NaN)
        : new Float32Array(buffer, 4 + length + 4 * count * (place + 1), count);
    }
    return found;
  }
  const textOf = (i) => data.texts[data.words[i]];

  // Values that rarely change come as runs of tokens that share them.
  function spread(runs, count) {
    data.authors = new Uint8Array(count);
    data.mask = new Uint8Array(count);
    data.epochs = new Int32Array(count);
    data.versions = new Int32Array(count);
    data.temperatures = new Float32Array(count);
    runs.forEach(([start, author, mask, epoch, version, temperature], n) => {
      const end = n + 1 < runs.length ? runs[n + 1][0] : count;
      data.authors.fill(author, start, end);
      data.mask.fill(mask, start, end);
      data.epochs.fill(epoch, start, end);
      data.versions.fill(version, start, end);
      data.temperatures.fill(temperature === null ? NaN : temperature, start, end);
    });
    data.policies = [...new Set(runs.filter((run) => run[4] >= 0).map((run) => run[3] + ":" + run[4]))];
  }

  // Bins: "" no colour, o not applicable, s1-s6 one-sided, n4-n1 and p1-p4 two-sided, k0-k7 kinds.
  const above = (value, limits) => limits.filter((limit) => value > limit).length;
  const LOGPROB = [0.1, 0.5, 1, 2, 4, 8];
  const DIFFERENCE = [0.01, 0.05, 0.2, 0.5];
  const ADVANTAGE = [0, 0.5, 1, 1.5];
  function signed(value, limits) {
    const level = above(Math.abs(value), limits);
    return level ? (value < 0 ? "n" : "p") + level : "";
  }
  const BINS = {
    logprob(i) {
      // Demonstrations were sampled by nobody: theirs is the trainer's.
      const value = Number.isNaN(data.logprobs[i]) ? data.trainer[i] : data.logprobs[i];
      const level = above(-value, LOGPROB);
      return Number.isNaN(value) ? "o" : level ? "s" + level : "";
    },
    difference: (i) => Number.isNaN(difference(i)) ? "o" : signed(difference(i), DIFFERENCE),
    advantage: (i) => Number.isNaN(data.advantages[i]) ? "o" : signed(data.advantages[i], ADVANTAGE),
    mask: (i) => ["k1", "k0", "o", "k7"][data.mask[i]],
    author: (i) => ["k7", "k0", "k2", "k3"][data.authors[i]],
    version: (i) => data.versions[i] < 0 ? "o" : "k" + (data.policies.indexOf(policy(i)) % 8),
  };
  const difference = (i) => data.trainer[i] - data.logprobs[i];
  const policy = (i) => data.versions[i] < 0 ? "" : data.epochs[i] + ":" + data.versions[i];

  function twoSided(limits, unit) {
    const steps = limits.map((limit, n) => [n + 1, limit]);
    return [
      ...steps.slice().reverse().map(([n, limit]) => ["n" + n, "< −" + limit]),
      ["", "about 0"],
      ...steps.map(([n, limit]) => ["p" + n, "> " + limit + unit]),
    ];
  }
  const LEGENDS = {
    logprob: () => [["", "likely"], ...LOGPROB.map((limit, n) => ["s" + (n + 1), "< −" + limit]), ["o", "not sampled"]],
    difference: () => [...twoSided(DIFFERENCE, ""), ["o", "not known"]],
    advantage: () => [...twoSided(ADVANTAGE, ""), ["o", "none"]],
    mask: () => [["k0", "trained"], ["k1", "not trained"], ["k7", "not known"], ["o", "not the policy's"]],
    author: () => [["k7", "prompt"], ["k0", "policy"], ["k2", "environment"], ["k3", "forced"]],
    version: () => [...data.policies.map((name, n) => ["k" + (n % 8), name]), ["o", "not the policy's"]],
  };

  function makeChunks() {
    const found = [];
    data.parts.forEach(([start, length, author, turn], part) => {
      let begin = start;
      for (let i = start; i < start + length; i++) {
        const long = i - begin >= MOST_CHUNK || (i - begin >= LEAST_CHUNK && textOf(i).includes("\n"));
        const within = i + 1 < data.count && data.first[i + 1] <= i;
        if ((long && !within) || i === start + length - 1) {
          found.push({ begin, end: i + 1, part, node: null, made: false });
          begin = i + 1;
        }
      }
    });
    return found;
  }

  // An estimate, without which far more chunks would at first seem to be in view.
  function heightOf(chunk, columns) {
    let lines = 1, column = 0;
    for (let i = chunk.begin; i < chunk.end; i++) {
      if (data.first[i] !== i) continue;
      const text = shownText(i), end = text.lastIndexOf("\n");
      column += text.length;
      if (end >= 0) {
        lines += 1 + Math.floor(column / columns);
        column = text.length - end - 1;
      }
    }
    return (lines + Math.floor(column / columns)) * LINE_PX;
  }

  function addParts() {
    const columns = Math.max(20, (track.clientWidth - HEAD_PX) / CHARACTER_PX);
    const fragment = document.createDocumentFragment();
    let body = null, shown = -1;
    for (const chunk of chunks) {
      if (chunk.part !== shown) {
        const [start, length, author, turn] = data.parts[chunk.part];
        const section = document.createElement("section");
        section.className = "passage";
        section.dataset.step = "";
        section.tabIndex = -1;
        const head = document.createElement("h3");
        head.textContent = AUTHORS[author] === "policy" && turn ? "Turn " + turn : AUTHORS[author];
        const small = document.createElement("small");
        small.textContent = length.toLocaleString("en") + " tokens";
        head.append(small);
        body = document.createElement("div");
        section.append(head, body);
        fragment.append(section);
        shown = chunk.part;
      }
      chunk.node = document.createElement("div");
      chunk.node.className = "chunk";
      chunk.node.style.minHeight = heightOf(chunk, columns) + "px";
      body.append(chunk.node);
    }
    track.replaceChildren(fragment);
  }

  function make(chunk) {
    if (chunk.made) return;
    chunk.made = true;
    const fragment = document.createDocumentFragment();
    for (let i = chunk.begin; i < chunk.end; i++) {
      if (data.first[i] !== i) continue;
      const span = document.createElement("span");
      span.className = data.ends.has(i) ? "t picture" : "t";
      span.dataset.i = i;
      span.dataset.b = BINS[colour](i);
      span.textContent = shownText(i);
      fragment.append(span);
    }
    chunk.node.style.minHeight = "";
    chunk.node.classList.add("made");
    chunk.node.replaceChildren(fragment);
  }

  // A token may end within a character: its text belongs to the token that completes it.
  const shownText = (i) => data.ends.has(i) ? "picture, " + (data.ends.get(i) - i).toLocaleString("en") + " tokens"
    : textOf(i) === "" ? "·" : textOf(i).replaceAll("\n", "↵\n");
  const chunkOf = (i) => {
    let low = 0, high = chunks.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (chunks[middle].end <= i) low = middle + 1; else high = middle;
    }
    return chunks[low];
  };
  function spanOf(i) {
    const chunk = chunkOf(i);
    make(chunk);
    return chunk.node.querySelector(`[data-i="${data.first[i]}"]`);
  }

  function paint(name) {
    colour = name;
    track.dataset.colour = name;
    for (const button of view.querySelectorAll("[data-colour]"))
      if (button.tagName === "BUTTON") button.setAttribute("aria-pressed", button.dataset.colour === name);
    for (const chunk of chunks)
      if (chunk.made) for (const span of chunk.node.children) span.dataset.b = BINS[name](Number(span.dataset.i));
    legend.replaceChildren(...LEGENDS[name]().map(([bin, text]) => {
      const item = document.createElement("li"), swatch = document.createElement("span");
      swatch.dataset.b = bin;
      swatch.setAttribute("aria-hidden", "true");
      if (name === "mask" && bin === "k1") swatch.className = "crossed";
      swatch.textContent = bin === "o" ? "\u00a0" : "a";
      item.append(swatch, text);
      return item;
    }));
    const address = new URL(location.href);
    address.searchParams.set("colour", name);
    if (location.protocol.startsWith("http")) history.replaceState(null, "", address);
  }

  // The shortest digits that parse to this float32.
  function exact(value) {
    for (let digits = 1; digits < 9; digits++) {
      const text = value.toPrecision(digits);
      if (Math.fround(Number(text)) === value) return String(Number(text));
    }
    return String(Number(value.toPrecision(9)));
  }
  function numbersOf(i) {
    const rows = [["token", i.toLocaleString("en") + " of " + data.count.toLocaleString("en")], ["id", String(data.ids[data.words[i]])], ["author", AUTHORS[data.authors[i]]]];
    const add = (label, value) => Number.isNaN(value) || rows.push([label, exact(value)]);
    add("logprob", data.logprobs[i]);
    if (!Number.isNaN(data.logprobs[i])) rows.push(["probability", (100 * Math.exp(data.logprobs[i])).toPrecision(3) + " %"]);
    add("trainer's logprob", data.trainer[i]);
    if (!Number.isNaN(difference(i))) rows.push(["trainer − engine", difference(i).toPrecision(4)]);
    add("advantage", data.advantages[i]);
    add("entropy", data.entropy[i]);
    add("correction weight", data.weights[i]);
    rows.push(["mask", MASKS[data.mask[i]]]);
    if (policy(i)) rows.push(["policy version", policy(i)]);
    add("temperature", data.temperatures[i]);
    return rows;
  }

  function show(span, spoken) {
    const i = Number(span.dataset.i), rows = numbersOf(i);
    const title = document.createElement("b"), list = document.createElement("dl");
    title.textContent = JSON.stringify(textOf(i));
    for (const [label, value] of rows) {
      const term = document.createElement("dt"), detail = document.createElement("dd");
      term.textContent = label;
      detail.textContent = value;
      list.append(term, detail);
    }
    card.replaceChildren(title, list);
    card.dataset.i = i;
    card.hidden = false;
    const box = span.getClientRects()[0] || span.getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - card.offsetWidth - 12);
    const below = box.bottom + 8 + card.offsetHeight < innerHeight;
    card.style.left = Math.max(12, left) + "px";
    card.style.top = (below ? box.bottom + 8 : Math.max(8, box.top - card.offsetHeight - 8)) + "px";
    if (spoken) voice.textContent = textOf(i) + ", " + rows.map((row) => row.join(" ")).join(", ");
  }
  const hide = () => { card.hidden = true; };

  function focusToken(i) {
    const span = spanOf(i);
    if (current && current !== span) current.removeAttribute("tabindex");
    current = span;
    span.tabIndex = 0;
    span.focus({ preventScroll: true });
    span.scrollIntoView({ block: "nearest" });
    show(span, true);
  }

  track.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".t");
    if (span) show(span, false); else hide();
  });
  track.addEventListener("pointerleave", hide);
  track.addEventListener("focusin", (event) => {
    if (event.target.classList.contains("t")) show(event.target, true);
  });
  track.addEventListener("focusout", hide);
  track.addEventListener("click", (event) => {
    const span = event.target.closest(".t");
    if (span) focusToken(Number(span.dataset.i));
  });
  view.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-colour]");
    if (button) paint(button.dataset.colour);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
    const number = Number(event.key);
    if (number >= 1 && number <= COLOURS.length) return paint(COLOURS[number - 1]);
    if (event.key === "Escape") return hide();
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const here = document.activeElement;
    if (!by || !here || !track.contains(here)) return;
    event.preventDefault();
    if (here.classList.contains("t")) {
      const i = Number(here.dataset.i), from = by > 0 ? (data.ends.get(i) ?? i + 1) - 1 : i;
      focusToken(Math.min(Math.max(from + by, 0), data.count - 1));
    } else {
      const part = [...track.children].indexOf(here.closest(".passage"));
      focusToken(data.parts[Math.max(part, 0)][0]);
    }
  });

  async function load() {
    const inline = document.getElementById("token-data");
    if (inline) return Uint8Array.from(atob(JSON.parse(inline.textContent)), (c) => c.charCodeAt(0)).buffer;
    const answer = await fetch(view.dataset.source, { credentials: "same-origin" });
    if (!answer.ok) throw new Error("the server answered " + answer.status);
    return answer.arrayBuffer();
  }

  async function start() {
    data = unpack(await load());
    spread(data.runs, data.count);
    chunks = makeChunks();
    view.hidden = false;
    addParts();
    const requested = new URLSearchParams(location.search).get("colour");
    paint(COLOURS.includes(requested) ? requested : "logprob");
    const nodes = new Map(chunks.map((chunk) => [chunk.node, chunk]));
    const watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) {
        make(nodes.get(entry.target));
        watcher.unobserve(entry.target);
      }
    }, { rootMargin: "400px 0px" });
    for (const chunk of chunks) watcher.observe(chunk.node);
    if (chunks.length) {
      current = spanOf(chunks[0].begin);
      current.tabIndex = 0;
    }
    status.textContent = data.left_out ? data.left_out.toLocaleString("en") + " more tokens are in the table alone." : "";
    view.dataset.ready = "";
  }

  status.textContent = "Loading tokens…";
  start().catch((error) => { status.textContent = "The tokens could not be loaded: " + error.message; });
})();
