// The files in data/, and what is asked of the server where there is one.

import { Refused } from "./decisions.js";

export const TOKEN = document.querySelector('meta[name="token"]').content;

export async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300) || `${path}: ${answer.status}`);
  return answer;
}

export async function post(path, body, kind) {
  const headers = { "X-Token": TOKEN, "Content-Type": kind };
  const answer = await fetch(path, { method: "POST", headers, body });
  const said = await answer.json();
  if (!answer.ok) throw new Refused(said.error);
  return said;
}

/** The columns of the samples, each read when it is first asked for. */
export class Table {
  constructor(meta) {
    Object.assign(this, { meta, columns: new Map(), files: null, reading: null });
  }

  async column(name) {
    if (!this.columns.has(name)) {
      const { file, kind } = this.meta.columns[name];
      const bytes = await (await get(`data/${file}`)).arrayBuffer();
      this.columns.set(name, new (kind === "number" ? Float32Array : Int32Array)(bytes));
    }
    return this.columns.get(name);
  }

  /** One that was read before. */
  known(name) {
    return this.columns.get(name);
  }

  names() {
    this.reading ??= get("data/files.txt").then((answer) => answer.text())
      .then((text) => { this.files = text.split("\n"); return this.files; });
    return this.reading;
  }
}

/** Give a person a file. */
export function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
