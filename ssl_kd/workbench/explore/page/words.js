// What the page says and asks.

export const $ = (id) => document.getElementById(id);
export const number = (value) => value.toLocaleString("en");

let quiet;
export function say(text, bad = false, lasting = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
  clearTimeout(quiet);
  if (!lasting) quiet = setTimeout(() => { $("status").textContent = ""; }, bad ? 8000 : 2500);
}

/** A decision in words. */
export function told(line) {
  const rows = line.rows && `${number(line.rows.length)} sample${line.rows.length > 1 ? "s" : ""}`;
  return {
    rename: () => `${line.cluster} ${line.name ? `is called “${line.name}”` : "has no name"}`,
    merge: () => `${line.clusters.join(", ")} merged` + (line.name ? ` as “${line.name}”` : ""),
    split: () => (rows ? `${rows} of ${line.cluster} are ${line.new}`
      : `${line.cluster} split in ${line.parts.length + 1} (${line.level})`),
    move: () => `${rows} moved to ${line.into ?? line.new}`,
    exclude: () => `${rows} excluded`,
    undo: () => "undo",
  }[line.do]?.() ?? line.do;
}

/** What a person types; null where they think better of it. */
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
