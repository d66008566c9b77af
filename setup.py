"""What setup.cfg cannot say: the description with links that work where the README is read without the repository."""

import posixpath
import re
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!#|[a-z]+:)([^)\s]+)\)")
PAGES = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Source": ""}


def description(readme: str, address: str) -> str:
    """The README for a package index.

    Parameters
    ----------
    readme : str
        Markdown, with links to files of the repository.
    address : str
        Under which its files are published. Links lead there; without, they become text that names the file, which the source distribution
        holds, and pictures are left out.
    """

    def replaced(link: re.Match) -> str:
        picture, text, target = link.groups()
        if address:
            return f"{picture}[{text}]({posixpath.join(address, target)})"
        file = target.partition("#")[0]
        return "" if picture else text if file in text else f"{text} (`{file}`)"

    return LINK.sub(replaced, readme)


def urls(address: str) -> dict[str, str]:
    """The project's pages under its address; none without one."""
    return {name: posixpath.join(address, target) for name, target in PAGES.items()} if address else {}


def public_address() -> str:
    """That of setup.cfg's section ``numba_flash``; empty while the repository has none."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["numba_flash"]["address"]


if __name__ == "__main__":
    from setuptools import setup

    address = public_address()
    setup(long_description=description((ROOT / "README.md").read_text(), address), project_urls=urls(address))
