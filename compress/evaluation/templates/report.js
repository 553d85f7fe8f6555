"use strict";
// Shows each chart in its figure. A figure is hidden until then: without scripts there is no empty frame.
(() => {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const options = {
    mode: "vega-lite", renderer: "svg", ast: true, actions: false, defaultStyle: false,
    tooltip: { theme: "chart", disableDefaultStyle: true },
  };
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    figure.hidden = false;
    vegaEmbed(figure.querySelector("div"), specs[figure.dataset.chart], options).catch((error) => {
      figure.hidden = true;
      console.error(error);
    });
  }
})();
