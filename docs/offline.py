"""Built pages load nothing from elsewhere: they can be read without a network, and tell nobody that they are read."""

import re
from html.parser import HTMLParser
from pathlib import Path

ELSEWHERE = re.compile(r"\s*(?:[a-z]+:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?((?:[a-z]+:)?//[^\"')\s;]+)", re.IGNORECASE)
FOLLOWED, NAMED = {"a", "area"}, {"canonical", "license"}  # elements, and relations of <link>, that a browser does not load by itself


class _Loads(HTMLParser):
    """Collects the addresses that the browser asks for when it shows a page."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        if tag in FOLLOWED or (tag == "link" and given.get("rel") in NAMED):
            return
        entries = [given.get(name, "") for name in ("src", "href", "data", "poster")]
        entries += given.get("srcset", "").split(",")
        self.found += [entry.strip() for entry in entries if ELSEWHERE.match(entry)]
        self.found += IN_STYLES.findall(given.get("style", ""))


def loaded_from_elsewhere(folder: Path) -> list[str]:
    """``file: address`` of everything that pages and style sheets in a folder have browsers load from other places."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".html", ".css")):
        text = path.read_text()
        page = _Loads()
        if path.suffix == ".html":
            page.feed(text)
        addresses = page.found if path.suffix == ".html" else IN_STYLES.findall(text)
        found += [f"{path.relative_to(folder)}: {address}" for address in addresses]
    return found
