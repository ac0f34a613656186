// Messages, questions and descriptions of decisions.

export const $ = (id) => document.getElementById(id);
export const number = (value) => value.toLocaleString("en");

/** A number with three digits, or whole if it is large. */
export const round = (value) => (Math.abs(value) >= 1000 ? number(Math.round(value)) : `${+value.toPrecision(3)}`);

export const percent = (share) => `${Math.round(100 * share)} %`;

/** Make an element with properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const WHOLE = 34, TAIL = 28; // characters of a name that stay visible; of a longer one, the last ones

/** A path that is cut in the middle where it does not fit: the name of the file stays. */
export function makePath(path) {
  const name = path.length - 1 - path.lastIndexOf("/", path.length - 2);
  const at = path.length - (name > WHOLE ? TAIL : name);
  const ends = [make("span", { textContent: path.slice(0, at) }), make("span", { textContent: path.slice(at) })];
  const whole = make("span", { className: "path", title: path }, ...ends);
  whole.style.setProperty("--tail", path.length - at);
  return whole;
}

/** Make a dot with a color. */
export function makeDot(background, className = "") {
  const dot = make("i", { className });
  dot.style.background = background;
  return dot;
}

let timer;
export function showMessage(text, isError = false, stays = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", isError);
  clearTimeout(timer);
  if (!stays) timer = setTimeout(() => { $("status").textContent = ""; }, isError ? 8000 : 2500);
}

/** One line that describes a decision; `rows` is a number of samples. */
export function describe(line) {
  const rows = line.rows && `${number(line.rows)} sample${line.rows > 1 ? "s" : ""}`;
  return {
    rename: () => `${line.cluster} ${line.name ? `is called “${line.name}”` : "has no name"}`,
    merge: () => `${line.clusters.join(", ")} merged` + (line.name ? ` as “${line.name}”` : ""),
    split: () => (rows ? `${rows} of ${line.cluster} are ${line.new}`
      : `${line.cluster} split in ${line.parts.length + 1} (${line.level})`),
    move: () => `${rows} moved to ${line.into ?? line.new}`,
    exclude: () => `${rows} excluded`,
    check: () => `${rows} checked`,
    undo: () => "a decision is undone",
  }[line.do]() + (line.by ? ` by ${line.by}` : "");
}

/** Ask for a line of text; null if the user cancels. */
export function ask(question, answer = "") {
  $("question").textContent = question;
  $("answer").value = answer;
  const dialog = $("ask");
  dialog.returnValue = "";
  dialog.showModal();
  $("answer").select();
  return new Promise((done) => dialog.addEventListener("close",
    () => done(dialog.returnValue === "ok" ? $("answer").value.trim() : null), { once: true }));
}
