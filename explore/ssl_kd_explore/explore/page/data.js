// Read the files in data/, and send requests to the server if there is one.

export const TOKEN = document.querySelector('meta[name="token"]').content; // "": a static page

export async function get(path) {
  const answer = await fetch(path);
  if (answer.ok) return answer;
  const text = (await answer.text()).slice(0, 300);
  const [, reason] = text.match(/^{"error": (".*")}$/) ?? []; // of the server of `ssl_kd explore`
  throw new Error(reason ? JSON.parse(reason) : text || `${path}: ${answer.status}`);
}

/** Find the samples that pass the filters (column -> text), in the order of a column if there is one. */
export async function findRows(filters, sort = null, descending = false) {
  const query = new URLSearchParams({ filter: JSON.stringify(filters) });
  if (sort) query.set("sort", sort);
  if (descending) query.set("descending", "1");
  return new Uint32Array(await (await get(`api/rows?${query}`)).arrayBuffer());
}

/** The cells of samples: a list of values for each row. */
export async function readCells(rows, columns) {
  return (await (await get(`api/cells?${new URLSearchParams({ rows, columns })}`)).json()).rows;
}

// A spreadsheet would run such a text as a formula; `ssl_kd.core.files.cells` escapes it in the same way.
const FORMULA = /^'*(?![-+]?\d+(\.\d+)?$)[=+\-@\t\r\n＝＋－＠]/;

/** The text of a CSV file; `lines` are lists of values. */
export const toCsv = (lines) => lines.map((line) => `${line.map((value) => {
  const cell = typeof value === "string" && FORMULA.test(value) ? `'${value}` : `${value ?? ""}`;
  return /[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}).join(",")}\r\n`).join("");

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

  /** The file name of a sample; a server gives it alone, because a million names need much memory. */
  async name(row) {
    return TOKEN ? (await readCells([row], ["file"]))[0][0] : (await this.names())[row];
  }

  /** The file name of every sample. */
  names() {
    this.reading ??= get("data/files.txt").then((answer) => answer.text())
      .then((text) => { this.files = text.split("\n"); return this.files; })
      .catch((error) => { this.reading = null; throw error; }); // the next call tries again
    return this.reading;
  }
}
