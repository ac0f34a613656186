// Follow the decisions that others make in the same run.

import { get } from "./data.js";
import { describe, showMessage } from "./messages.js";

const PAUSE = 2000, LONGEST = 60000; // milliseconds between questions; the second if there is no answer

/** Show new decisions of others as they come, while the page is visible. */
export async function follow(app) {
  for (let pause = PAUSE; ; ) {
    await new Promise((done) => setTimeout(done, pause));
    if (document.hidden) continue;
    try {
      const before = app.decisions.lines.length, { lines } = await (await get("api/version")).json();
      if (pause > PAUSE) showMessage("The server answers again");
      pause = PAUSE;
      if (lines === before || app.decisions.lines.length !== before) continue; // or decided here meanwhile
      await app.showDecisions(await (await get("data/decisions.json")).json());
      const last = app.decisions.lines.at(-1);
      if (last) showMessage(`Changed elsewhere: ${describe(last)}`);
    } catch (error) {
      if (pause === PAUSE) showMessage("The server does not answer: is ssl_kd explore running?", true, true);
      pause = Math.min(2 * pause, LONGEST);
    }
  }
}
