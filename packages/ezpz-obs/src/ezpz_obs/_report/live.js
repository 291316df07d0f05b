  // In page.js, of `ezpz-obs report --serve` alone: asks for what is new, and shows it in the same view.
  const ask = async mark => {
    const began = performance.now();
    try {
      const answer = await fetch("", { cache: "no-store", headers: { "If-None-Match": mark } });
      if (answer.ok && !document.querySelector("main :active")) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        document.querySelector("main").replaceWith(page.querySelector("main"));
        mark = answer.headers.get("ETag");
        start();
      }
      document.querySelector(".live").hidden = !answer.ok && answer.status !== 304;
    } catch { document.querySelector(".live").hidden = true; }
    setTimeout(ask, Math.max(1000, 5 * (performance.now() - began)), mark);
  };
  ask("");
