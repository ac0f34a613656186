// Read the files in data/, and send requests to the server if there is one.

export const TOKEN = document.querySelector('meta[name="token"]').content; // "": a static page

export async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300) || `${path}: ${answer.status}`);
  return answer;
}

export async function post(path, value) {
  const headers = { "X-Token": TOKEN, "Content-Type": "application/json" };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(value) });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

/** Read a file of `size` bytes. */
export async function readBytes(path, size) {
  const content = await (await get(path)).arrayBuffer(), found = content.byteLength;
  if (found !== size) throw new Error(`${path} has ${found} bytes; expected ${size}: reload the page`);
  return content;
}

/** File names in one block of memory, because a million strings would need far more. */
export class FileNames {
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

  /** The samples whose name contains a text, ignoring case. */
  search(text) {
    const rows = [], wanted = text.toLowerCase(), block = 8192;
    for (let first = 0; first < this.ends.length; first += block) {
      const last = Math.min(first + block, this.ends.length) - 1;
      const names = this.text(first, last).toLowerCase();
      if (!names.includes(wanted)) continue;
      names.split("\n").forEach((name, i) => { if (name.includes(wanted)) rows.push(first + i); });
    }
    return rows;
  }
}

/** The columns of the samples, each read when it is first needed. */
export class Table {
  constructor(meta) {
    Object.assign(this, { meta, columns: new Map(), files: null, reading: null });
  }

  async column(name) {
    if (!this.columns.has(name)) {
      const { file, kind } = this.meta.columns[name];
      const content = await readBytes(`data/${file}`, 4 * this.meta.samples);
      this.columns.set(name, new (kind === "number" ? Float32Array : Int32Array)(content));
    }
    return this.columns.get(name);
  }

  names() {
    this.reading ??= get("data/files.txt").then((answer) => answer.arrayBuffer())
      .then((content) => { this.files = new FileNames(new Uint8Array(content)); return this.files; })
      .catch((error) => { this.reading = null; throw error; }); // the next call tries again
    return this.reading;
  }
}
