// A table that fits its panel does not scroll by itself: its head then stays at the top of the page.
"use strict";

(() => {
  const fit = (box) => box.classList.toggle("fits", box.firstElementChild.scrollWidth <= box.clientWidth);
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) fit(target.closest(".scroll"));
  });
  const watch = () => {
    sizes.disconnect();
    document.querySelectorAll(".scroll").forEach((box) => {
      sizes.observe(box);
      sizes.observe(box.firstElementChild);
    });
  };
  document.addEventListener("htmx:afterSettle", watch);
  watch();
})();
