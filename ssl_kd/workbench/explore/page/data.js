// The files in data/, and what is asked of the server where there is one.

import { Refused } from "./decisions.js";

export const TOKEN = document.querySelector('meta[name="token"]').content;

export async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300) || `${path}: ${answer.status}`);
  return answer;
}

export async function post(path, body, kind, name = "") {
  const headers = { "X-Token": TOKEN, "Content-Type": kind, "X-File-Name": encodeURIComponent(name) };
  const answer = await fetch(path, { method: "POST", headers, body });
  const said = await answer.json();
  if (!answer.ok) throw new Refused(said.error);
  return said;
}

/** A file of so many bytes; `told` hears how many have come. */
export async function bytes(path, size, told = () => {}) {
  const reader = (await get(path)).body.getReader(), whole = new Uint8Array(size);
  let at = 0;
  for (let part; !(part = await reader.read()).done; told(at)) {
    if (at + part.value.length <= size) whole.set(part.value, at);
    at += part.value.length;
  }
  if (at !== size) throw new Error(`${path} has ${at} bytes; expected ${size}: it is of another page`);
  return whole.buffer;
}

/** The file names, as they came: a million of them are one block of memory, not a million texts. */
export class Names {
  constructor(lines) {
    Object.assign(this, { lines, ends: [], decoder: new TextDecoder() });
    let n = 1;
    for (let at = lines.indexOf(10); at >= 0; at = lines.indexOf(10, at + 1)) n++;
    this.ends = new Uint32Array(n).fill(lines.length);
    for (let at = lines.indexOf(10), i = 0; at >= 0; at = lines.indexOf(10, at + 1)) this.ends[i++] = at;
  }

  text(first, last) {
    return this.decoder.decode(this.lines.subarray(first ? this.ends[first - 1] + 1 : 0, this.ends[last]));
  }

  of(row) {
    return this.text(row, row);
  }

  /** The samples whose name has these words in it, whatever the case. */
  search(words) {
    const found = [], wanted = words.toLowerCase(), block = 8192;
    for (let first = 0; first < this.ends.length; first += block) {
      const last = Math.min(first + block, this.ends.length) - 1;
      const text = this.text(first, last).toLowerCase();
      if (!text.includes(wanted)) continue;
      text.split("\n").forEach((name, i) => { if (name.includes(wanted)) found.push(first + i); });
    }
    return found;
  }
}

/** The columns of the samples, each read when it is first asked for. */
export class Table {
  constructor(meta) {
    Object.assign(this, { meta, columns: new Map(), files: null, reading: null, near: new Map() });
  }

  async column(name, told) {
    if (!this.columns.has(name)) {
      const { file, kind } = this.meta.columns[name];
      const read = await bytes(`data/${file}`, 4 * this.meta.samples, told);
      this.columns.set(name, new (kind === "number" ? Float32Array : Int32Array)(read));
    }
    return this.columns.get(name);
  }

  /** One that was read before. */
  known(name) {
    return this.columns.get(name);
  }

  names() {
    this.reading ??= get("data/files.txt").then((answer) => answer.arrayBuffer())
      .then((read) => { this.files = new Names(new Uint8Array(read)); return this.files; })
      .catch((error) => { this.reading = null; throw error; }); // to be tried again
    return this.reading;
  }

  /** The nearest samples of one, of a static page: out of a file of some thousand samples. */
  async neighbours(row) {
    const { neighbours: k, per_file: rows, samples } = this.meta, part = Math.floor(row / rows);
    const size = 4 * k * Math.min(rows, samples - part * rows);
    if (!this.near.has(part)) {
      this.near.set(part, bytes(`data/neighbours_${part}.i32`, size)
        .catch((error) => { this.near.delete(part); throw error; }));
    }
    const found = new Int32Array(await this.near.get(part)), first = (row - part * rows) * k;
    return [...found.subarray(first, first + k)].filter((other) => other >= 0);
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
