// Keeps what changes by itself up to date. Without it, everything works by loading pages.
//
// <div data-live="2" id="…">: its content is fetched again every 2 seconds while it has an element with data-going, and
// every 15 otherwise. Nothing is replaced while a person types in it or marks text in it; focus and what is folded open
// stay. <… data-announce="…">: read out by screen readers when it has changed.
"use strict";
(() => {
  const SLOW_S = 15;
  const region = document.querySelector("[data-live]");
  const announcer = document.getElementById("announcer");
  if (!region) return;
  let paused = false;
  let pressed = false; // a click whose button is replaced between press and release is lost
  let took = 0;
  let said = announcement();

  function announcement() {
    const element = region.querySelector("[data-announce]");
    return element ? element.dataset.announce : "";
  }

  function busy() {
    const selection = document.getSelection();
    const marked = selection && !selection.isCollapsed && region.contains(selection.anchorNode);
    const active = document.activeElement;
    const typing = region.contains(active) && active.matches("input, select, textarea");
    return marked || typing || pressed;
  }

  // How an element is found again after its region was replaced.
  function path(element) {
    const steps = [];
    for (let one = element; one !== region; one = one.parentElement) {
      if (one.id) return { id: one.id, steps };
      steps.unshift([...one.parentElement.children].indexOf(one));
    }
    return { id: "", steps };
  }

  function found({ id, steps }) {
    let one = id ? document.getElementById(id) : region;
    for (const step of steps) one = one && one.children[step];
    return one;
  }

  function show(text) {
    if (busy() || text === region.dataset.shown) return;
    const focused = region.contains(document.activeElement) ? path(document.activeElement) : null;
    const open = [...region.querySelectorAll("details[id]")].filter((one) => one.open).map((one) => one.id);
    const scrolled = [...region.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    const drawn = new Map([...region.querySelectorAll("picture")].map((one) => [one.innerHTML, one]));
    region.innerHTML = text; // of our own server, which escapes what others wrote
    // A picture that is the same stays: loaded anew, it would flicker.
    for (const one of region.querySelectorAll("picture")) {
      const before = drawn.get(one.innerHTML);
      if (before) one.replaceWith(before);
    }
    region.dataset.shown = text;
    for (const id of open) {
      const details = document.getElementById(id);
      if (details) details.open = true;
    }
    region.querySelectorAll(".scroll").forEach((one, index) => (one.scrollLeft = scrolled[index] || 0));
    if (focused) {
      const again = found(focused);
      if (again) again.focus({ preventScroll: true });
    }
    if (announcement() !== said) {
      said = announcement();
      announcer.textContent = said;
    }
  }

  async function refresh() {
    if (!paused && !document.hidden) {
      const address = new URL(location.href);
      address.hash = "";
      address.searchParams.set("fragment", "1");
      const began = performance.now();
      try {
        const answer = await fetch(address, { cache: "no-store", credentials: "same-origin" });
        const text = await answer.text();
        took = performance.now() - began;
        if (answer.ok) {
          show(text);
          if (announcer.dataset.lost) announcer.textContent = announcer.dataset.lost = "";
        } else lost(answer.status === 503 ? "the server does not answer" : "the page cannot be brought up to date");
      } catch {
        lost("the command behind this page has ended");
      }
    }
    const every = region.querySelector("[data-going]") ? Number(region.dataset.live) : SLOW_S;
    setTimeout(refresh, Math.max(1000 * every, 10 * took)); // a long run costs its server a tenth of its time at most
  }

  function lost(why) {
    if (announcer.dataset.lost) return;
    announcer.dataset.lost = new Date().toLocaleTimeString();
    announcer.textContent = `Not up to date since ${announcer.dataset.lost}: ${why}.`;
  }

  region.addEventListener("pointerdown", () => (pressed = true));
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => setTimeout(() => (pressed = false), 50));
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain pause";
  button.textContent = "Pause refreshing";
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Refresh again" : "Pause refreshing";
  });
  announcer.after(button);
  setTimeout(refresh, 1000 * Number(region.dataset.live));
})();
