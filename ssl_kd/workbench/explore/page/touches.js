// Fingers, for a library that knows mice.

/** One finger is a mouse, two fingers are its wheel. */
export function touches(canvas) {
  let finger = null, pressed = false, apart = 0;
  const mouse = (kind, touch) => canvas.dispatchEvent(new MouseEvent(kind, { bubbles: true,
    clientX: touch.clientX, clientY: touch.clientY, buttons: kind === "mouseup" ? 0 : 1, view: window }));
  const between = ([a, b]) => Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
  const on = (kind, act) => canvas.addEventListener(kind, (event) => {
    event.preventDefault();
    act(event);
  }, { passive: false });
  /** It moves the map by where the mouse was a frame ago: so it has to see it there first. */
  const press = () => {
    if (pressed || finger === null) return;
    pressed = true;
    mouse("mousedown", finger);
  };
  const release = (touch) => {
    if (pressed) mouse("mouseup", touch);
    [finger, pressed] = [null, false];
  };
  on("touchstart", ({ touches }) => {
    if (touches.length === 1) {
      [finger, pressed] = [touches[0], false];
      mouse("mousemove", finger);
      requestAnimationFrame(() => requestAnimationFrame(press));
    } else {
      release(touches[0]);
      apart = between(touches);
    }
  });
  on("touchmove", ({ touches }) => {
    if (pressed && touches.length === 1) {
      mouse("mousemove", touches[0]);
    } else if (finger === null && touches.length === 2) {
      const [a, b] = touches, now = between(touches);
      const middle = { clientX: (a.clientX + b.clientX) / 2, clientY: (a.clientY + b.clientY) / 2 };
      mouse("mousemove", middle);
      canvas.dispatchEvent(new WheelEvent("wheel", { bubbles: true, cancelable: true, ...middle,
        deltaY: -canvas.clientHeight * Math.log(now / apart) }));
      apart = now;
    }
  });
  on("touchend", ({ changedTouches: [touch] }) => {
    if (finger === null) return;
    const { clientX, clientY } = finger;
    const still = Math.hypot(touch.clientX - clientX, touch.clientY - clientY) < 8;
    press();
    release(touch);
    if (still) mouse("click", touch);
  });
  on("touchcancel", ({ changedTouches: [touch] }) => release(touch));
}
