"""What the docs site does beyond mkdocs: a menu from the index, no links to files it lacks, an API reference.

Pages are written for a reader of the repository. On the site a link to a file outside docs/ becomes its text, and a
link to a file that does not exist is a warning, which a strict build fails on.
"""

import ast
import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks.quire")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The menu is the order of the table in docs/README.md."""
    index = Path(config.docs_dir, "README.md").read_text()
    pages = re.findall(r"^\| \[[^\]]*\]\(([\w.-]+\.md)\)", index, re.MULTILINE)
    config.nav = ["README.md", *pages, {"API reference": "api.md"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the public names."""
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace each link that leaves docs/ by its text."""

    def text(link: re.Match[str]) -> str:
        if not (ROOT / link[2]).exists():
            log.warning("%s links to ../%s, which does not exist", page.file.src_uri, link[2])
        return link[1]

    return LINK.sub(text, markdown)


def api_page() -> str:
    """One entry for each name that `import quire` offers."""
    tree = ast.parse((ROOT / "src/quire/__init__.py").read_text())
    (homes,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_HOME"
    ]
    entries = [f"::: {home}.{name}\n" for name, home in homes.items()]
    return "\n".join(["# API reference\n", "What `import quire` offers.\n", *entries])
