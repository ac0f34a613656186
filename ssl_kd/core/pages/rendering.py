"""Fill in the templates of pages."""

from typing import Any

import jinja2


def rendered(package: str, template: str, content: dict[str, Any]) -> str:
    """Return the HTML of a template of `package`, which may extend `frame.html`.

    Raises jinja2.UndefinedError if `content` lacks a value.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(package), jinja2.PackageLoader("ssl_kd.core.pages")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(content)
