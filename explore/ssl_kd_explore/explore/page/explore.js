// The page: the map, and the panel beside it. Its data are the files in data/. If `ssl_kd explore`
// serves it, it also gets images and neighbors from the server and sends decisions to it.

import { Clusters } from "./clusters.js";
import { MISSING, RAMP, clusterColor, rampColor, setColors, toHex } from "./colors.js";
import { TOKEN, Table, get, post, readBytes, readCells } from "./data.js";
import { Dock } from "./dock.js";
import { follow } from "./follow.js";
import { Lightbox } from "./lightbox.js";
import { isLarge, mediaElement, toggle } from "./media.js";
import { $, ask, describe, make, makeDot, number, round, showMessage } from "./messages.js";
import { Pictures, readWords, wordsElement } from "./pictures.js";
import { Plot, bytesOfIndex } from "./plot.js";

const SHOWN_PICTURES = 60, SHOWN_EXAMPLES = 40, SHOWN_VALUES = 24;
const RESIZED = 200; // milliseconds until the map has its new size

let meta, table, pictures, plot, clusters, dock, lightbox, ready = false, isDeciding = false;
let showsExcluded = false;
let color = "cluster", chosen = [], isChosen; // rows of the selected samples; isChosen: [n]
let decisions; // { clusters: [n], sizes: number -> samples, names: number -> name, words: of the others, lines }

// --- Decisions ----------------------------------------------------------------------------------

/** Read the clusters after all decisions; `content` is decisions.json. */
async function readDecisions(content) {
  const clusters = new Int32Array(await readBytes("data/clusters.i32", 4 * meta.samples));
  const counts = []; // an array by number is fast for a million samples
  for (const k of clusters) if (k >= 0) counts[k] = (counts[k] ?? 0) + 1;
  const sizes = new Map();
  counts.forEach((size, k) => sizes.set(k, size));
  const excluded = meta.samples - counts.reduce((sum, size) => sum + size, 0);
  decisions = { ...content, clusters, sizes, excluded };
}

const isVisible = (row) => showsExcluded || decisions.clusters[row] >= 0;

/** Hide or show the excluded samples, everywhere. */
function showExcluded() {
  const { excluded } = decisions, isHiding = excluded && !showsExcluded;
  Object.assign($("excluded"), { hidden: !excluded, ariaPressed: showsExcluded,
    textContent: `${number(excluded)} excluded`, title: `${showsExcluded ? "Hide" : "Show"} the excluded samples` });
  plot.keep(isHiding ? Uint32Array.from({ length: meta.samples }, (_, row) => row).filter(isVisible) : null);
  if (isHiding && !chosen.every(isVisible)) select(chosen.filter(isVisible));
}

async function decide(decision) {
  isDeciding = true;
  try {
    await showDecisions(await post("api/curation", decision));
    showMessage("Written to curation.jsonl");
  } catch (error) {
    showMessage(error.message, true);
  }
  isDeciding = false;
}

/** Show the samples after all decisions; `content` is decisions.json. */
async function showDecisions(content) {
  await readDecisions(content);
  showPanel();
  await paint();
  showExcluded();
  if (dock.tab) await dock.refresh();
}

const lastActive = () => decisions.lines.findLast((line) => !line.undone && line.do !== "undo");
const undo = (id = lastActive()?.id) =>
  (id ? decide({ do: "undo", of: id }) : showMessage("There is nothing to undo"));

const nameOf = (k) => (k < 0 ? "no cluster" : decisions.names[k] ?? decisions.words[k] ?? `Cluster ${k}`);

// --- The map ------------------------------------------------------------------------------------

const titleOf = (name) => make("b", {}, name.replaceAll("_", " "));

/** A part of the legend, if the samples have not all a value. */
const noValue = (codes) => (codes.includes(0) ? [make("span", {}, makeDot(MISSING), "no value")] : []);

/** The color code of each sample, the color of each code, and the legend. */
async function colorCodes() {
  const codes = new Uint32Array(meta.samples);
  if (color === "cluster") {
    const numbers = [...decisions.sizes.keys()].sort((a, b) => a - b);
    const at = new Uint32Array(2 + (numbers.at(-1) ?? 0)); // by number + 1; 0: in no cluster
    numbers.forEach((k, i) => { at[k + 1] = i + 1; });
    for (let i = 0; i < codes.length; i++) codes[i] = at[decisions.clusters[i] + 1];
    return { codes, colors: [MISSING, ...numbers.map(clusterColor)], legend: [] };
  }
  const { kind, values, low, high } = meta.columns[color], column = await table.column(color);
  if (kind === "number") {
    const steps = 62 / Math.max(high - low, 1e-12);
    for (let i = 0; i < codes.length; i++) {
      const at = (column[i] - low) * steps;
      codes[i] = Number.isNaN(at) ? 0 : 1 + Math.min(62, Math.max(0, Math.round(at)));
    }
    const ramp = make("span", { className: "ramp" });
    ramp.style.background = `linear-gradient(90deg, ${RAMP.join(",")})`;
    const colors = [MISSING, ...Array.from({ length: 63 }, (_, i) => rampColor(i / 62))];
    const legend = [titleOf(color), round(low), ramp, `${column.some((value) => value > high) ? "≥ " : ""}${round(high)}`];
    return { codes, colors, legend: [...legend, ...noValue(codes)] };
  }
  let last = -1;
  for (let i = 0; i < codes.length; i++) {
    codes[i] = column[i] + 1;
    if (column[i] > last) last = column[i];
  }
  const colors = [MISSING, ...Array.from({ length: last + 1 }, (_, k) => clusterColor(k))];
  const shown = (values ?? []).slice(0, SHOWN_VALUES).map((name, k) => [name, clusterColor(k)]);
  if (values?.length > SHOWN_VALUES) shown.push([`and ${values.length - SHOWN_VALUES} more`, MISSING]);
  const legend = shown.map(([name, background]) => make("span", {}, makeDot(background), name));
  return { codes, colors, legend: values ? [titleOf(color), ...legend, ...noValue(codes)] : legend };
}

async function paint() {
  const wanted = color, { codes, colors, legend } = await colorCodes();
  if (wanted !== color) return; // the user chose another one meanwhile
  await plot.paint(codes, colors);
  if (wanted !== color) return;
  $("legend").replaceChildren(...legend);
  document.body.dataset.color = color;
  placeExamples();
}

let examples = new Map(), isPlanned = false;
function placeExamples() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    const { width, height } = $("overlay").getBoundingClientRect(), taken = [], next = new Map();
    const side = width < 500 ? 34 : 48;
    const legend = $("legend"), [right, top] = legend.childNodes.length
      ? [legend.offsetWidth + 40, height - legend.offsetHeight - 40] : [0, height];
    const wanted = $("examples").ariaPressed === "true" && pictures.any ? meta.examples : [];
    for (const row of wanted) {
      if (taken.length >= Math.min(SHOWN_EXAMPLES, (width * height) / 16000)) break;
      if (!isVisible(row)) continue;
      const [x, y] = plot.screen(row);
      if (x < 24 || y < 24 || x > width - 24 || y > height - 24) continue; // half of it is outside
      if (x < right && y > top) continue;
      if (taken.some(([a, b]) => Math.abs(a - x) < side + 14 && Math.abs(b - y) < side + 14)) continue;
      const image = examples.get(row) ?? pictures.element(row, side);
      if (!image) continue;
      taken.push([x, y]);
      Object.assign(image.style, { left: `${x}px`, top: `${y}px`, borderColor: plot.colorOf(row) });
      image.classList.toggle("dim", chosen.length > 1 && !isChosen[row]);
      next.set(row, image);
    }
    examples = next;
    $("overlay").replaceChildren(...next.values());
    placeTip();
  });
}

let hovered = null;
function placeTip() {
  const tip = $("tip"), ringed = hovered ?? (chosen.length === 1 ? chosen[0] : null);
  tip.hidden = hovered === null;
  $("ring").hidden = ringed === null;
  if (ringed === null) return;
  const [x, y] = plot.screen(ringed), box = $("map").getBoundingClientRect();
  Object.assign($("ring").style, { left: `${x}px`, top: `${y}px` });
  if (hovered === null) return;
  const left = x + 16 + tip.offsetWidth > box.width ? x - 16 - tip.offsetWidth : x + 16;
  const top = Math.min(Math.max(4, y - 30), box.height - tip.offsetHeight - 4);
  Object.assign(tip.style, { left: `${Math.max(4, left)}px`, top: `${Math.max(4, top)}px` });
}

async function hover(row) {
  if (row === hovered) return;
  hovered = row;
  if (row === null) return placeTip();
  const name = make("div", {}, await table.name(row));
  const cluster = make("small", {}, nameOf(decisions.clusters[row]));
  const media = await mediaElement(meta, row);
  if (hovered !== row) return;
  $("tip").replaceChildren(...pictures.list(row, 160), media ?? "", name, cluster);
  placeTip();
}

// --- The panel ----------------------------------------------------------------------------------

function select(rows, zoom = false) {
  onSelected(rows);
  plot.select(chosen);
  if (zoom && chosen.length) plot.fit(chosen);
}

/** Show what is selected on the map. */
function onSelected(rows) {
  for (const row of chosen) isChosen[row] = 0;
  chosen = Object.assign(Uint32Array.from(rows), { nearestTo: rows.nearestTo }); // a text, if they were searched by it
  for (const row of chosen) isChosen[row] = 1;
  showPanel();
  $("chosen").scrollTop = 0;
  if (!$("cluster").childElementCount) $("panel").scrollTop = 0;
  dock.selected();
}

function pictureButton(row, text) {
  const images = pictures.list(row, 64), className = images.length ? "" : "plain";
  const onclick = () => { select([row]); plot.panTo(row); };
  const button = make("button", { type: "button", className, onclick }, ...images);
  button.dataset.row = row;
  setTitle(button, text ?? table.files?.[row] ?? `sample ${row}`);
  return button;
}

function setTitle(button, text) {
  button.title = button.ariaLabel = text;
  if (button.className) button.replaceChildren(wordsElement(meta, text)); // it has no picture
}

async function showPictures(rows) {
  const buttons = rows.map((row) => pictureButton(row));
  $("pictures").replaceChildren(...buttons);
  const words = await readWords(meta, rows);
  buttons.forEach((button, i) => setTitle(button, words.get(rows[i]) ?? button.title));
}

/** What is known about a sample: name and value of each column. */
async function valuesOf(row) {
  if (TOKEN) {
    const columns = meta.table.filter(({ kind, name }) => kind !== "media" && name !== "cluster");
    const [cells] = await readCells([row], columns.map(({ name }) => name));
    return columns.map(({ name }, at) => [name, cells[at]]);
  }
  return Promise.all(["file", ...Object.keys(meta.columns)].map(async (name) => {
    if (name === "file") return [name, await table.name(row)];
    const value = (await table.column(name))[row], { values } = meta.columns[name];
    return [name, values ? values[value] : value];
  }));
}

async function showSample(row) {
  const [[, file], ...others] = await valuesOf(row);
  const known = others.filter(([, value]) => (value ?? "") !== "" && !Number.isNaN(value))
    .map(([name, value]) => [name, typeof value === "number" && value % 1 ? value.toFixed(3) : value]);
  const lines = [["", file], ["cluster", nameOf(decisions.clusters[row])], ...known];
  const media = await mediaElement(meta, row, true);
  if (chosen.length !== 1 || chosen[0] !== row) return;
  const texts = lines.map(([name, value]) =>
    make("div", {}, make("small", {}, name ? `${name} ` : ""), String(value)));
  const open = { className: "zoom", title: "Open large (v)", ariaLabel: "Open large", onclick: () => view(row) };
  const images = pictures.list(row, 112).map((image) => make("button", open, image));
  $("sample").replaceChildren(...images, make("div", {}, media ?? "", ...texts));
  if (!TOKEN) return;
  try {
    const near = (await (await get(`api/neighbors/${row}`)).json()).filter(isVisible);
    if (chosen.length === 1 && chosen[0] === row) await showPictures(near);
  } catch (error) {
    showMessage(error.message, true);
  }
}

/** Open the picture of a sample large; the others are those of the table, the pictures or the selection. */
function view(row = chosen[0]) {
  if (row === undefined) return showMessage("Select a sample first");
  if (!pictures.any && !isLarge(meta)) return showMessage("The samples have no pictures, texts or sounds");
  const lists = [dock.listed, chosen.length > 1 ? chosen : dock.subset,
    [row, ...[...$("pictures").children].map(({ dataset }) => Number(dataset.row))]];
  return lightbox.open(row, lists.find((rows) => rows.includes(row)));
}

/** Play or stop the sound of the selected sample. */
function play() {
  const sound = $("sample").querySelector("audio");
  if (!sound) return showMessage(meta.media?.kind === "audio" ? "Select one sound first" : "The samples are no sounds");
  return toggle(sound);
}

function showPanel() {
  $("selected").hidden = !chosen.length;
  $("sample").replaceChildren();
  const one = chosen.length === 1;
  $("selected-title").textContent = one ? "Sample" : chosen.nearestTo
    ? `${number(chosen.length)} samples nearest to “${chosen.nearestTo}”` : `${number(chosen.length)} samples selected`;
  const counts = new Map();
  for (const row of chosen) {
    counts.set(decisions.clusters[row], (counts.get(decisions.clusters[row]) ?? 0) + 1);
  }
  const order = [...counts].sort((a, b) => b[1] - a[1]);
  const more = order.length > 4 ? ` and ${order.length - 4} more clusters` : "";
  $("selected-about").textContent = one ? (TOKEN ? "Its nearest neighbors are below." : "")
    : order.slice(0, 4).map(([k, count]) => `${number(count)} of ${nameOf(k)}`).join("; ") + more;
  if (one) {
    $("pictures").replaceChildren();
    showSample(chosen[0]);
  } else {
    const step = Math.max(1, chosen.length / SHOWN_PICTURES);
    const rows = Array.from({ length: Math.min(chosen.length, SHOWN_PICTURES) },
      (_, i) => chosen[Math.floor(i * step)]);
    showPictures(rows);
  }
  clusters.show(counts);
  showHistory();
  placeExamples();
}

function showHistory() {
  const last = lastActive(), title = last ? `Undo: ${describe(last)} (u)` : "There is nothing to undo";
  Object.assign($("undo"), { disabled: !last, title });
  const lines = decisions.lines.filter((line) => line.do !== "undo").slice(-100).reverse();
  $("history").replaceChildren(...lines.map((line) => {
    const item = make("li", {}, make("span", { textContent: describe(line), title: line.time }));
    item.classList.toggle("undone", line.undone);
    const about = "Take back this decision";
    const button = { textContent: "×", className: "edit", title: about, ariaLabel: about, onclick: () => undo(line.id) };
    if (!line.undone && line !== last) item.append(make("button", button)); // Undo takes back the last one
    return item;
  }));
}

// --- Actions ------------------------------------------------------------------------------------

async function makeCluster() {
  if (!chosen.length) return showMessage("Select samples first: with the lasso, or a cluster");
  const name = await ask(`Name of the new cluster of ${number(chosen.length)} (may stay empty)`);
  if (name === null) return;
  const cluster = decisions.clusters[chosen[0]], rows = sortedRows();
  const isPart = cluster >= 0 && rows.length < decisions.sizes.get(cluster)
    && rows.every((row) => decisions.clusters[row] === cluster);
  const decision = isPart ? { do: "split", cluster } : { do: "move" };
  await decide({ ...decision, rows, new: null, ...(name ? { name } : {}) });
}

const sortedRows = () => [...chosen.slice().sort()];

const decideOnChosen = (what) => () =>
  (chosen.length ? decide({ do: what, rows: sortedRows() }) : showMessage("Select samples first"));
const exclude = decideOnChosen("exclude"), check = decideOnChosen("check");

async function search() {
  if ($("search-by").value === "meaning" && $("query").value.trim()) return searchMeaning($("query").value.trim());
  const text = $("query").value.trim().toLowerCase(), rows = [];
  if (TOKEN) await dock.search(text);
  else if (text) {
    (await table.names()).forEach((name, row) => { if (name.toLowerCase().includes(text)) rows.push(row); });
    select(rows.filter(isVisible), true);
  } else select([]);
  if (text) showMessage(chosen.length ? `${number(chosen.length)} found` : `Nothing contains “${text}”`);
}

/** Select the samples that the teacher finds most similar to a text, most similar first. */
let asked;
async function searchMeaning(text) {
  const request = asked = {};
  $("find").ariaBusy = true;
  showMessage("Searching; the first search loads the teacher …", false, true);
  try {
    const { rows } = await (await get(`api/search?${new URLSearchParams({ text })}`)).json();
    if (request !== asked) return; // a newer search has started
    select(Object.assign(Uint32Array.from(rows.filter(isVisible)), { nearestTo: text }), true);
    showMessage(`${number(chosen.length)} samples nearest to “${text}”`);
  } catch (error) {
    if (request === asked) showMessage(error.message, true, true);
  } finally {
    if (request === asked) $("find").ariaBusy = false;
  }
}

function setLasso(on) {
  plot.lasso = on;
  $("lasso").ariaPressed = on;
}

const showHelp = () => $("shortcuts").showModal();
const click = (id) => () => $(id).click();
const KEYS = [
  ["0", "show the whole map", click("home")],
  ["l", "lasso on or off; or drag with Shift", click("lasso")],
  ["Escape", "close the page of a cluster, or select nothing", () => { if (clusters.close()) return; setLasso(false); select([]); }],
  ["e", "example images on or off", click("examples")],
  ["v", "open the selected picture, text or sound large; ← and → go on", () => view()],
  ["p", "play or stop the selected sound", () => play()],
  ["/", "search", () => $("query").focus()],
  ["g", "go to the list of clusters; Space ticks or selects, Enter opens", () => clusters.focus()],
  ["?", "this list", showHelp],
];
const EDITING_KEYS = [
  ["r", "rename the selected or ticked cluster", () => clusters.rename()],
  ["m", "merge the ticked clusters", () => clusters.merge()],
  ["t", "split the selected or ticked cluster by the tree", () => clusters.split()],
  ["s", "make a cluster of the selected samples", makeCluster],
  ["x", "exclude the selected samples", exclude],
  ["c", "mark the selected samples as checked", check],
  ["b", "table, pictures and chart: open or close", () => dock.show(dock.tab ? null : undefined)],
  ["u", "undo the last decision", () => undo()],
];
if (TOKEN) KEYS.push(...EDITING_KEYS);

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !ready) return;
  if (document.querySelector("dialog[open]")) return;
  const isTyping = event.target.matches("input:not([type=checkbox]), select");
  if (isTyping && event.key !== "Escape") return;
  if (isTyping) event.target.blur();
  const act = KEYS.find(([key]) => key === event.key)?.[2];
  if (!act) return;
  event.preventDefault();
  act();
}

// --- Start --------------------------------------------------------------------------------------

function addListeners() {
  const actions = { new: makeCluster, exclude, check, clear: () => select([]),
    view: () => view(), excluded: () => { showsExcluded = !showsExcluded; showExcluded(); placeExamples(); if (dock.tab) dock.refresh(); },
    lasso: () => setLasso(!plot.lasso), undo: () => undo(), help: showHelp, home: () => plot.home(),
    examples: () => { $("examples").ariaPressed = $("examples").ariaPressed !== "true"; placeExamples(); } };
  for (const [id, act] of Object.entries(actions)) $(id).onclick = act;
  $("move").onchange = () => {
    const into = Number($("move").value);
    if ($("move").value) decide({ do: "move", rows: sortedRows(), into });
  };
  $("find").onsubmit = (event) => { event.preventDefault(); search(); };
  $("color").onchange = () => { color = $("color").value; return paint(); };
  document.addEventListener("keydown", onKey);
  new ResizeObserver(() => setTimeout(placeExamples, RESIZED)).observe($("map"));
  window.addEventListener("unhandledrejection",
    ({ reason }) => showMessage(reason?.message ?? `${reason}`, true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setBackground);
  $("keys").replaceChildren(
    ...KEYS.flatMap(([keys, text]) => [make("dt", {}, keys), make("dd", {}, text)]));
}

/** Set the background of the map for the light or dark theme. */
function setBackground() {
  const style = getComputedStyle(document.documentElement);
  plot.background = toHex(style.getPropertyValue("--page").trim());
}

// What other modules, tests, benchmarks and the browser's console use.
const app = { search, select, view, decide, nameOf, showDecisions, pictureButton, isVisible,
  get table() { return table; }, get hidden() { return showsExcluded ? 0 : decisions.excluded; },
  get pictures() { return pictures; }, get plot() { return plot; }, get meta() { return meta; },
  get clusters() { return clusters; }, get dock() { return dock; }, get decisions() { return decisions; },
  get chosen() { return chosen; }, get isChosen() { return isChosen; },
  get isDeciding() { return isDeciding; } };
window.explore = app;

async function start() {
  meta = await (await get("data/meta.json")).json();
  Object.setPrototypeOf(meta.columns, null); // a column may be called `constructor`
  setColors(meta.colors);
  table = new Table(meta);
  document.title = meta.title;
  document.body.classList.toggle("read-only", !TOKEN);
  const n = meta.samples;
  isChosen = new Uint8Array(n);
  $("title").replaceChildren(meta.title, make("small", {}, `${number(n)} samples`));
  $("title").title = `Run ${meta.run}`;
  pictures = new Pictures(meta);
  const options = (names) => names.map((name) => new Option(name.replaceAll("_", " "), name));
  const ofRun = Object.keys(meta.columns).filter((name) => !meta.own.includes(name));
  $("color").replaceChildren(...options(["cluster", ...ofRun]), ...(meta.own.length
    ? [make("optgroup", { label: "Own columns" }, ...options(meta.own))] : []));
  $("view").hidden = !pictures.any && !isLarge(meta);
  $("search-by").hidden = !meta.searches_texts;
  $("search-by").title = "Words: samples that contain the text. Meaning: samples that the teacher finds most similar to it";
  if (!pictures.any) $("examples").hidden = true;
  const [index] = await Promise.all([readBytes("data/places.kd", bytesOfIndex(n)),
    get("data/decisions.json").then((answer) => answer.json()).then(readDecisions)]);
  $("loading-text").textContent = `Drawing ${number(n)} samples`;
  await new Promise(requestAnimationFrame);
  plot = new Plot($("canvas"), index, {
    view: placeExamples, hover, select: onSelected, lassoed: () => setLasso(false) });
  setBackground();
  await paint();
  clusters = new Clusters(app);
  dock = new Dock(app);
  lightbox = new Lightbox(app);
  addListeners();
  showPanel();
  showExcluded();
  $("loading").hidden = true;
  ready = true;
  document.body.dataset.ready = "yes";
  if (TOKEN) follow(app);
}

start().catch((error) => {
  $("loading").hidden = true;
  $("title").textContent = "This page cannot be shown";
  showMessage(error.message, true, true);
  throw error;
});
