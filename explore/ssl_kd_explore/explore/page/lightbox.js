// One picture, text or sound, large and whole, and the way to the ones before and after it in a list.

import { TOKEN, get } from "./data.js";
import { mediaElement } from "./media.js";
import { $, make, number } from "./messages.js";

const SIDE = 2048, COPIED = 1500; // pixels of a picture, at most; milliseconds

export class Lightbox {
  /** @param app the page: meta, pictures, decisions, nameOf, table */
  constructor(app) {
    Object.assign(this, { app, rows: [], at: 0 });
    $("lightbox-previous").onclick = () => this.show(this.at - 1);
    $("lightbox-next").onclick = () => this.show(this.at + 1);
    $("lightbox-copy").onclick = () => this.copy();
    $("lightbox-close").onclick = () => $("lightbox").close();
    $("lightbox").onclick = ({ target }) => { if (target === $("lightbox")) target.close(); }; // beside the content
    $("lightbox").onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); this.show(this.at + step); }
    };
    $("lightbox").onclose = () => {
      $("lightbox-picture").replaceChildren();
      (this.opener?.isConnected ? this.opener : $("canvas")).focus({ preventScroll: true });
    };
  }

  /** Show a sample among `rows`, in their order. */
  open(row, rows) {
    this.opener = document.activeElement;
    this.rows = rows;
    $("lightbox").showModal();
    $("lightbox-next").focus();
    return this.show(Math.max(0, rows.indexOf(row)));
  }

  async show(at) {
    const { app, rows } = this, row = rows[at];
    if (row === undefined) return;
    this.at = at;
    $("lightbox-place").textContent = `${number(at + 1)} of ${number(rows.length)}`;
    $("lightbox-cluster").textContent = app.nameOf(app.decisions.clusters[row]);
    $("lightbox-previous").disabled = at === 0;
    $("lightbox-next").disabled = at === rows.length - 1;
    if (document.activeElement === document.body) $("lightbox-close").focus(); // the button was disabled
    if (app.pictures.any) $("lightbox-picture").replaceChildren(this.picture(row));
    if (TOKEN && app.pictures.any && at + 1 < rows.length) new Image().src = this.source(rows[at + 1]); // it is next
    const media = app.pictures.any ? null : await mediaElement(app.meta, row, true);
    if (rows !== this.rows || at !== this.at) return;
    if (media) $("lightbox-picture").replaceChildren(media);
    const path = TOKEN ? (await (await get(`api/path/${row}`)).json()).path : await app.table.name(row);
    if (rows !== this.rows || at !== this.at) return;
    $("lightbox-path").textContent = path;
  }

  source(row) {
    return `api/image/${row}?side=${SIDE}`;
  }

  /** The picture as an element; a static page has a small one only. */
  picture(row) {
    const { pictures } = this.app;
    if (!TOKEN) return pictures.element(row, 320) ?? make("p", { textContent: "This page has no picture of it." });
    return make("img", { src: this.source(row), alt: "", className: pictures.tiny ? "tiny" : "" });
  }

  async copy() {
    const path = $("lightbox-path");
    try {
      await navigator.clipboard.writeText(path.textContent);
      $("lightbox-copy").textContent = "Copied";
    } catch { // the browser allows it to pages from this machine or over https alone
      getSelection().selectAllChildren(path);
      $("lightbox-copy").textContent = "Press Ctrl-C";
    }
    setTimeout(() => { $("lightbox-copy").textContent = "Copy path"; }, COPIED);
  }
}
