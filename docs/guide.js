// The guide's additions to its theme: examples name this installation, and readers choose what the navigation shows.
const EXAMPLE = "127.0.0.1:8545";
const STORED = "penstock.guide.reader";
// The choices, and the sections that each of them leaves out.
const READERS = {
  everyone: { label: "Everything", without: [] },
  customer: { label: "I call the API", without: ["Operate", "Internals"] },
  operator: { label: "I run the service", without: ["Start", "Use"] },
};
// Examples in these sections are about hosts that the reader sets up, not about this one.
const OTHER_HOSTS = ["Operate", "Internals"];

const sections = () =>
  [...document.querySelectorAll(".md-nav--primary > .md-nav__list > .md-nav__item--nested")].map((item) => ({
    item,
    name: item.querySelector(".md-nav__link .md-ellipsis").textContent.trim(),
    isCurrent: item.classList.contains("md-nav__item--active"),
  }));

function nameThisHost() {
  if (location.host === EXAMPLE || sections().some((each) => each.isCurrent && OTHER_HOSTS.includes(each.name))) return;
  const here = { http: location.origin, ws: location.origin.replace(/^http/, "ws") };
  for (const code of document.querySelectorAll("article code")) {
    const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode;
      if (text.data.includes(EXAMPLE))
        text.data = text.data.replace(/\b(http|ws):\/\/127\.0\.0\.1:8545/g, (_, scheme) => here[scheme]);
    }
  }
}

function show(reader) {
  for (const { item, name, isCurrent } of sections()) item.hidden = !isCurrent && READERS[reader].without.includes(name);
}

function addSwitch() {
  const kept = localStorage.getItem(STORED);
  const select = document.createElement("select");
  select.className = "guide-reader";
  select.setAttribute("aria-label", "Show pages for");
  for (const [name, { label }] of Object.entries(READERS)) select.add(new Option(label, name));
  select.value = kept in READERS ? kept : "everyone";
  select.addEventListener("change", () => {
    localStorage.setItem(STORED, select.value);
    show(select.value);
  });
  document.querySelector(".md-nav--primary > .md-nav__list").before(select);
  show(select.value);
}

// The theme gives its search the role of a dialog, and no name for screen readers.
document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
nameThisHost();
addSwitch();
