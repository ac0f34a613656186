// The page: the map, the panel beside it and the decisions. Data are the files in data/; where
// `ssl_kd explore` serves it, images, neighbours and decisions are asked of it.

import { GREY, RAMP, mixed, plain, tint } from "./colours.js";
import { TOKEN, Table, bytes, get, post, save } from "./data.js";
import { Decisions, folded } from "./decisions.js";
import { Pictures } from "./pictures.js";
import { Plot } from "./plot.js";
import { $, ask, number, say, told } from "./words.js";

const SHOWN_PICTURES = 60, SHOWN_CLUSTERS = 400, SHOWN_EXAMPLES = 40, SHOWN_VALUES = 24;

let meta, table, decisions, pictures, plot, ready = false;
let colour = "cluster", chosen = [], marked, ticked = new Set(); // marked: of each sample

// --- Decisions ----------------------------------------------------------------------------------

const stored = () => `ssl_kd curation ${meta.digest} ${meta.samples}`;

async function startDecisions() {
  const base = await table.column("cluster", reading("clusters", 4 * meta.samples));
  decisions = new Decisions(base, meta, (name) => table.known(name));
  if (TOKEN) return follow((await (await get("api/curation")).json()).lines);
  await follow(meta.lines);
  const mine = localStorage.getItem(stored()) ?? "[]";
  try {
    const known = new Set(meta.lines.map((line) => line.id));
    await follow([...meta.lines, ...JSON.parse(mine).filter((line) => !known.has(line.id))]);
  } catch (error) { // it would stand in the way of this page for good
    localStorage.setItem(`${stored()} ${Date.now()}`, mine);
    localStorage.removeItem(stored());
    say(`Decisions kept in this browser do not fit this page, and were set aside: ${error.message}`,
      true, true);
  }
}

async function follow(lines) {
  for (const line of lines) if (line.level in meta.columns) await table.column(line.level);
  decisions.replay(lines);
}

async function decide(said) {
  try {
    if (TOKEN) {
      await follow((await post("api/curation", JSON.stringify(said), "application/json")).lines);
    } else {
      for (const level of meta.levels) if (said.do === "split") await table.column(level);
      decisions.add(said);
    }
    ticked = new Set([...ticked].filter((k) => decisions.sizes.has(k)));
    if (TOKEN) say("Written to curation.jsonl");
    else keep();
  } catch (error) {
    say(error.message, true);
  }
  showPanel();
  await paint();
}

function keep() {
  try {
    localStorage.setItem(stored(), JSON.stringify(decisions.lines));
    say("Kept in this browser: download it to apply it");
  } catch {
    say("This browser has no room to keep it: download the decisions before you leave", true);
  }
}

function undo(of) {
  const live = decisions.live;
  of ??= decisions.lines.findLast((line) => live.has(line.id) && line.do !== "undo")?.id;
  return of ? decide({ do: "undo", of }) : say("There is nothing to undo");
}

const download = () => save("curation.jsonl",
  decisions.lines.map((line) => JSON.stringify(line) + "\n").join(""));

// --- Words --------------------------------------------------------------------------------------

/** What people called it, else what `export --names` did, unless another one is called so by now. */
function named(k) {
  if (decisions.names.has(k)) return decisions.names.get(k);
  const name = meta.names.cluster?.[k], taken = [...decisions.names.values()].map(folded);
  return name !== undefined && !taken.includes(folded(name)) ? name : undefined;
}
const called = (k) => (k < 0 ? "no cluster" : named(k) ?? `Cluster ${k}`);
const shown = (value) => (Number.isNaN(value) ? "unknown" : value.toFixed(3));

// --- The map ------------------------------------------------------------------------------------

/** Each sample's place among some colours, these colours, and what they mean. */
async function coloured() {
  if (colour === "cluster") {
    const numbers = [...decisions.sizes.keys()].sort((a, b) => a - b);
    const at = new Uint32Array(2 + (numbers.at(-1) ?? 0)); // by number + 1; 0: in no cluster
    numbers.forEach((k, i) => { at[k + 1] = i + 1; });
    const codes = new Uint32Array(meta.samples);
    for (let i = 0; i < codes.length; i++) codes[i] = at[decisions.clusters[i] + 1];
    return { codes, colours: [GREY, ...numbers.map(tint)], legend: [] };
  }
  const { kind, values, low, high } = meta.columns[colour], raw = await table.column(colour);
  const codes = new Uint32Array(meta.samples);
  if (kind === "number") {
    const steps = 62 / Math.max(high - low, 1e-12);
    for (let i = 0; i < codes.length; i++) {
      const at = (raw[i] - low) * steps;
      codes[i] = Number.isNaN(at) ? 0 : 1 + Math.min(62, Math.max(0, Math.round(at)));
    }
    const colours = Array.from({ length: 63 }, (_, i) => mixed(i / 62));
    return { codes, colours: [GREY, ...colours], legend: [low.toFixed(2), null, high.toFixed(2)] };
  }
  let most = -1;
  for (let i = 0; i < codes.length; i++) {
    codes[i] = raw[i] + 1;
    if (raw[i] > most) most = raw[i];
  }
  const colours = [GREY, ...Array.from({ length: most + 1 }, (_, k) => tint(k))];
  const legend = (values ?? []).slice(0, SHOWN_VALUES).map((name, k) => [name, tint(k)]);
  if (values?.length > SHOWN_VALUES) legend.push([`and ${values.length - SHOWN_VALUES} more`, GREY]);
  return { codes, colours, legend };
}

async function paint() {
  const wanted = colour, { codes, colours, legend } = await coloured();
  if (wanted !== colour) return; // another was chosen while this one was read
  await plot.paint(codes, plain(colours));
  if (wanted !== colour) return;
  $("legend").replaceChildren(...(legend.length === 3 && legend[1] === null
    ? [legend[0], Object.assign(document.createElement("span"), { className: "ramp",
      style: `background: linear-gradient(90deg, ${RAMP.join(",")})` }), legend[2]]
    : legend.map(([name, tinted]) => {
      const item = document.createElement("span"), dot = document.createElement("i");
      dot.style.background = tinted;
      item.append(dot, name);
      return item;
    })));
  document.body.dataset.colour = colour;
  placeExamples();
}

let overlaid = new Map(), due = false;
function placeExamples() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    const { width, height } = $("overlay").getBoundingClientRect(), taken = [], next = new Map();
    const side = width < 500 ? 34 : 48;
    const legend = $("legend"), [right, top] = legend.childNodes.length
      ? [legend.offsetWidth + 40, height - legend.offsetHeight - 40] : [0, height];
    const wanted = $("examples").ariaPressed === "true" && pictures.any ? meta.examples : [];
    for (const row of wanted) {
      if (taken.length >= Math.min(SHOWN_EXAMPLES, (width * height) / 16000)) break;
      if (decisions.excluded.has(row)) continue;
      const [x, y] = plot.screen(row);
      if (x < 24 || y < 24 || x > width - 24 || y > height - 24) continue; // half of it is outside
      if (x < right && y > top) continue;
      if (taken.some(([a, b]) => Math.abs(a - x) < side + 14 && Math.abs(b - y) < side + 14)) continue;
      taken.push([x, y]);
      const image = overlaid.get(row) ?? pictures.element(row, side);
      Object.assign(image.style, { left: `${x}px`, top: `${y}px`,
        borderColor: plot.tint(row) });
      image.classList.toggle("dim", chosen.length > 1 && !marked[row]);
      next.set(row, image);
    }
    overlaid = next;
    $("overlay").replaceChildren(...next.values());
    overTip();
  });
}

let over = null;
function overTip() {
  const tip = $("tip"), ringed = over ?? (chosen.length === 1 ? chosen[0] : null);
  tip.hidden = over === null;
  $("ring").hidden = ringed === null;
  if (ringed === null) return;
  const [x, y] = plot.screen(ringed), box = $("map").getBoundingClientRect();
  Object.assign($("ring").style, { left: `${x}px`, top: `${y}px` });
  if (over === null) return;
  const left = x + 16 + tip.offsetWidth > box.width ? x - 16 - tip.offsetWidth : x + 16;
  const top = Math.min(Math.max(4, y - 30), box.height - tip.offsetHeight - 4);
  Object.assign(tip.style, { left: `${Math.max(4, left)}px`, top: `${Math.max(4, top)}px` });
}

async function hover(row) {
  if (row === over) return;
  over = row;
  if (row === null) return overTip();
  const name = document.createElement("div"), where = document.createElement("small");
  name.textContent = (await table.names()).of(row);
  where.textContent = called(decisions.clusters[row]);
  if (over !== row) return;
  $("tip").replaceChildren(...pictures.all(row, 160), name, where);
  overTip();
}

// --- The panel ----------------------------------------------------------------------------------

function select(rows, zoom = false) {
  picked(rows);
  plot.select(chosen);
  if (zoom && chosen.length) plot.fit(chosen);
}

/** What is selected on the map. */
function picked(rows) {
  for (const row of chosen) marked[row] = 0;
  chosen = Uint32Array.from(rows);
  for (const row of chosen) marked[row] = 1;
  showPanel();
  $("panel").scrollTop = 0;
}

function tile(row) {
  const button = document.createElement("button"), images = pictures.all(row, 64);
  button.type = "button";
  button.dataset.row = row;
  button.title = table.files?.of(row) ?? `sample ${row}`;
  button.setAttribute("aria-label", button.title);
  button.append(...images);
  if (!images.length) {
    button.className = "plain";
    button.textContent = button.title;
  }
  button.onclick = () => { select([row]); panTo(row); };
  return button;
}

async function showSample(row) {
  const about = document.createElement("div"), lines = [["", (await table.names()).of(row)]];
  lines.push(["cluster", called(decisions.clusters[row])]);
  for (const [name, { kind, values }] of Object.entries(meta.columns)) {
    if (name === "cluster") continue;
    const value = (await table.column(name))[row];
    if (kind === "cluster") lines.push([name, meta.names[name]?.[value] ?? value]);
    else lines.push([name, kind === "number" ? shown(value) : values?.[value] ?? (value < 0 ? "unknown" : value)]);
  }
  if (chosen.length !== 1 || chosen[0] !== row) return;
  about.replaceChildren(...lines.map(([name, value]) => {
    const line = document.createElement("div"), small = document.createElement("small");
    small.textContent = name ? `${name} ` : "";
    line.append(small, String(value));
    return line;
  }));
  $("sample").replaceChildren(...pictures.all(row, 112), about);
  try {
    const near = await neighbours(row);
    if (chosen.length === 1 && chosen[0] === row) $("pictures").replaceChildren(...near.map(tile));
  } catch (error) {
    say(error.message, true);
  }
}

async function neighbours(row) {
  if (TOKEN) return (await get(`api/neighbours/${row}`)).json();
  return table.neighbours(row);
}

function showPanel() {
  $("selected").hidden = !chosen.length;
  $("sample").replaceChildren();
  const one = chosen.length === 1;
  $("selected-title").textContent = one ? "Sample" : `${number(chosen.length)} samples selected`;
  const inside = new Map();
  for (const row of chosen) {
    inside.set(decisions.clusters[row], (inside.get(decisions.clusters[row]) ?? 0) + 1);
  }
  const found = [...inside].sort((a, b) => b[1] - a[1]);
  const tail = found.length > 4 ? ` and ${found.length - 4} more clusters` : "";
  $("selected-about").textContent = one ? "Its nearest neighbours are below."
    : found.slice(0, 4).map(([k, count]) => `${number(count)} of ${called(k)}`).join(", ") + tail;
  if (one) {
    $("pictures").replaceChildren();
    showSample(chosen[0]);
  } else {
    const step = Math.max(1, chosen.length / SHOWN_PICTURES);
    const rows = Array.from({ length: Math.min(chosen.length, SHOWN_PICTURES) },
      (_, i) => chosen[Math.floor(i * step)]);
    $("pictures").replaceChildren(...rows.map(tile));
  }
  showClusters(inside);
  showHistory();
  placeExamples();
}

function showClusters(on) {
  const order = [...decisions.sizes].sort((a, b) => b[1] - a[1]);
  $("count").textContent = order.length > SHOWN_CLUSTERS
    ? `${number(order.length)}, the largest ${SHOWN_CLUSTERS} shown` : number(order.length);
  const focus = document.activeElement?.dataset?.of;
  $("clusters").replaceChildren(...order.slice(0, SHOWN_CLUSTERS).map(([k, size]) => {
    const item = document.createElement("li"), tick = document.createElement("input");
    const button = document.createElement("button"), dot = document.createElement("i");
    const name = document.createElement("b"), count = document.createElement("small");
    Object.assign(tick, { type: "checkbox", checked: ticked.has(k), ariaLabel: `tick ${called(k)}` });
    tick.dataset.of = `tick ${k}`;
    tick.onchange = () => { ticked[tick.checked ? "add" : "delete"](k); showButtons(); };
    dot.style.background = tint(k);
    name.textContent = called(k);
    count.textContent = number(size);
    button.classList.toggle("on", chosen.length > 1 && on.size === 1 && on.has(k));
    button.dataset.of = `${k}`;
    button.title = `Select the samples of ${called(k)} (number ${k})`;
    button.append(dot, name, count);
    button.onclick = () => {
      const rows = new Uint32Array(decisions.sizes.get(k));
      for (let row = 0, n = 0; n < rows.length; row++) if (decisions.clusters[row] === k) rows[n++] = row;
      select(rows);
    };
    item.append(tick, button);
    return item;
  }));
  if (focus !== undefined) document.querySelector(`[data-of="${focus}"]`)?.focus({ preventScroll: true });
  const options = [["", "Move to …"], ...order.slice(0, SHOWN_CLUSTERS).map(([k]) => [k, called(k)])];
  $("move").replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  showButtons();
}

function showButtons() {
  $("rename").disabled = $("split").disabled = ticked.size !== 1;
  $("merge").disabled = ticked.size < 2;
}

function showHistory() {
  const live = decisions.live;
  $("undo").disabled = !decisions.lines.some((line) => live.has(line.id) && line.do !== "undo");
  $("download").disabled = !decisions.lines.length;
  const items = decisions.lines.filter((line) => line.do !== "undo").slice(-100).reverse();
  $("history").replaceChildren(...items.map((line) => {
    const item = document.createElement("li"), text = document.createElement("span");
    text.textContent = told(line);
    text.title = line.time;
    item.append(text);
    item.classList.toggle("undone", !live.has(line.id));
    if (live.has(line.id)) {
      const button = document.createElement("button");
      button.textContent = "Undo";
      button.onclick = () => undo(line.id);
      item.append(button);
    }
    return item;
  }));
}

// --- What people do -----------------------------------------------------------------------------

async function makeCluster() {
  if (!chosen.length) return say("Select samples first: lasso them, or take a cluster");
  const name = await ask(`Name of the new cluster of ${number(chosen.length)} (may stay empty)`);
  if (name === null) return;
  const home = decisions.clusters[chosen[0]], rows = sorted();
  const same = home >= 0 && rows.every((row) => decisions.clusters[row] === home);
  const part = same && rows.length < decisions.sizes.get(home);
  const named = name ? { name } : {};
  await decide(part ? { do: "split", cluster: home, rows, new: null, ...named }
    : { do: "move", rows, new: null, ...named });
}

const sorted = () => [...chosen.slice().sort()];
const toClusters = () => $("clusters").querySelector("button")?.focus();

async function rename() {
  const k = [...ticked][0];
  if (ticked.size !== 1) return say("Tick one cluster to rename it");
  const name = await ask(`Name of ${called(k)} (empty: none)`, named(k) ?? "");
  if (name !== null) await decide({ do: "rename", cluster: k, name });
}

const merge = () => (ticked.size < 2 ? say("Tick two clusters or more to merge them")
  : decide({ do: "merge", clusters: [...ticked].sort((a, b) => a - b) }));
const split = () => (ticked.size !== 1 ? say("Tick one cluster to split it")
  : decide({ do: "split", cluster: [...ticked][0] }));
const exclude = () => (chosen.length ? decide({ do: "exclude", rows: sorted() })
  : say("Select samples first"));

async function search() {
  const words = $("query").value.trim();
  if (!words) return select([]);
  say("Looking …");
  const found = (await table.names()).search(words);
  select(found, true);
  say(found.length ? `${number(found.length)} found` : `No file name has “${words}” in it`);
}

async function searchByImage(file) {
  say("Looking …");
  try {
    const { rows } = await post("api/search", file, "application/octet-stream", file.name);
    select(rows, true);
    $("selected-title").textContent = `The ${rows.length} samples most like ${file.name}`;
    $("pictures").replaceChildren(...rows.map(tile));
  } catch (error) {
    say(error.message, true);
  }
}

function lasso(on = !plot.lasso) {
  plot.lasso = on;
  $("lasso").ariaPressed = on;
}

function panTo(row) {
  const [x, y] = plot.screen(row);
  if (x < 40 || y < 40 || x > plot.width - 40 || y > plot.height - 40) {
    plot.show(row);
  }
}

function takeMiddle() {
  const row = plot.nearest(plot.width / 2, plot.height / 2);
  if (row >= 0) select([row]);
}

async function nextColour() {
  $("colour").selectedIndex = ($("colour").selectedIndex + 1) % $("colour").length;
  colour = $("colour").value;
  await paint();
}

const press = (id) => () => $(id).click();
const KEYS = [
  ["←→↑↓", "move the map, when it has the focus", { ArrowLeft: () => plot.move(0.15, 0),
    ArrowRight: () => plot.move(-0.15, 0), ArrowUp: () => plot.move(0, -0.15),
    ArrowDown: () => plot.move(0, 0.15) }, true],
  ["+ −", "zoom in and out", { "+": () => plot.zoom(1.25), "=": () => plot.zoom(1.25), "-": () => plot.zoom(0.8) }],
  ["0", "show the whole map", { 0: press("home") }],
  ["Enter", "take the sample in the middle of the map", { Enter: takeMiddle }, true],
  ["l", "lasso on or off; Shift and drag does it, too", { l: () => lasso() }],
  ["Escape", "select nothing", { Escape: () => { lasso(false); select([]); } }],
  ["c", "colour by the next thing", { c: nextColour }],
  ["e", "example images on or off", { e: press("examples") }],
  ["/", "search by file name", { "/": () => $("query").focus() }],
  ["g", "go to the list of clusters; Space ticks, Enter selects", { g: toClusters }],
  ["r", "rename the ticked cluster", { r: rename }],
  ["m", "merge the ticked clusters", { m: merge }],
  ["t", "split the ticked cluster as the tree does", { t: split }],
  ["s", "make a cluster of the selected samples", { s: makeCluster }],
  ["x", "exclude the selected samples", { x: exclude }],
  ["u", "undo the last decision", { u: () => undo() }],
  ["d", "download the decisions", { d: download }],
  ["?", "these lines", { "?": () => $("shortcuts").showModal() }],
];

function keyboard(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !ready) return;
  if (document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input:not([type=checkbox]), select");
  if (typing && event.key !== "Escape") return;
  if (typing) event.target.blur();
  for (const [, , does, onMap] of KEYS) {
    const act = Object.hasOwn(does, event.key) ? does[event.key] : null;
    if (!act || (onMap && event.target !== $("canvas"))) continue;
    event.preventDefault();
    act();
  }
}

// --- Start --------------------------------------------------------------------------------------

function listen() {
  const does = { new: makeCluster, exclude, clear: () => select([]), rename, merge, split, download,
    lasso: () => lasso(), undo: () => undo(), help: () => $("shortcuts").showModal(),
    home: () => plot.home(),
    examples: () => { $("examples").ariaPressed = $("examples").ariaPressed !== "true"; placeExamples(); },
    "by-image": () => $("image-file").click() };
  for (const [id, act] of Object.entries(does)) $(id).onclick = act;
  $("move").onchange = () => {
    const into = Number($("move").value);
    if ($("move").value) decide({ do: "move", rows: sorted(), into });
  };
  $("find").onsubmit = (event) => { event.preventDefault(); search(); };
  $("image-file").onchange = () => { if ($("image-file").files[0]) searchByImage($("image-file").files[0]); };
  $("colour").onchange = () => { colour = $("colour").value; return paint(); };
  document.addEventListener("keydown", keyboard);
  window.addEventListener("unhandledrejection", ({ reason }) => say(reason?.message ?? `${reason}`, true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", light);
  $("keys").replaceChildren(...KEYS.flatMap(([keys, text]) => [
    Object.assign(document.createElement("dt"), { textContent: keys }),
    Object.assign(document.createElement("dd"), { textContent: text })]));
}

/** Says how much of a file has come. */
function reading(what, size) {
  const told = (came) => loading(size < 1e6 ? `Reading ${what}`
    : `Reading ${what}: ${(came / 1e6).toFixed(1)} of ${(size / 1e6).toFixed(1)} MB`, came / size);
  told(0);
  return told;
}

function loading(text, part) {
  $("loading").hidden = text === null;
  $("loading-text").textContent = text;
  if (part === undefined) $("loading-bar").removeAttribute("value");
  else $("loading-bar").value = part;
}

/** The map in the colours of day or night. */
function light() {
  const style = getComputedStyle(document.documentElement);
  [plot.background] = plain([style.getPropertyValue("--page").trim()]);
}

async function start() {
  meta = await (await get("data/meta.json")).json();
  table = new Table(meta);
  document.title = meta.title;
  marked = new Uint8Array(meta.samples);
  const small = document.createElement("small");
  small.textContent = `${number(meta.samples)} samples`;
  $("title").replaceChildren(meta.title, small);
  pictures = new Pictures(meta, TOKEN);
  $("colour").replaceChildren(...Object.keys(meta.columns)
    .map((name) => new Option(name.replace("_", " "), name)));
  $("by-image").hidden = !TOKEN || !meta.searches;
  const n = meta.samples;
  const flat = new Float32Array(await bytes("data/places.f32", 8 * n, reading("the map", 8 * n)));
  await startDecisions();
  loading(`Drawing ${number(n)} samples`);
  await new Promise(requestAnimationFrame);
  plot = new Plot($("canvas"), flat.subarray(0, n), flat.subarray(n), {
    view: placeExamples, hover, pick: (rows) => picked(rows), lassoed: () => lasso(false) });
  light();
  await paint();
  listen();
  showPanel();
  loading(null);
  ready = true;
  document.body.dataset.ready = "yes";
}

start().catch((error) => {
  $("loading").hidden = true;
  $("title").textContent = "This page cannot be shown";
  say(error.message, true, true);
  throw error;
});

// For tests, benchmarks and the browser's console.
window.explore = { search, get plot() { return plot; }, get decisions() { return decisions; },
  get chosen() { return chosen; }, get meta() { return meta; } };
