"""A process of its own that renders one chat template, which a stranger wrote, within limits of time and memory.

It imports nothing of Crius, is started by ``crius.tools.generate.chat``, reads a task as JSON from standard input, and
writes JSON: ``{"text": ...}`` or ``{"error": ...}``.
"""

import datetime
import json
import resource
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

CPU_SECONDS, MEMORY_BYTES, MOST_CHARACTERS = 4, 1 << 29, 1 << 20


def render(task: Mapping[str, Any]) -> str:
    """The text of ``task``: ``template``, the ``messages``, and ``tokens`` such as ``bos_token`` by name.

    Raises:
        Exception: whatever the template does wrong.
    """
    from jinja2 import TemplateError, ext, nodes, sandbox  # noqa: PLC0415  in the process that has limits

    class Generation(ext.Extension):
        """``{% generation %}`` marks what an assistant says; the text inside stays as it is."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    parts, length = [], 0
    template = environment.from_string(task["template"])
    for part in template.generate(messages=task["messages"], add_generation_prompt=True, **task["tokens"]):
        parts.append(part)
        length += len(part)
        if length > MOST_CHARACTERS:
            raise ValueError(f"it makes more than {MOST_CHARACTERS:,} characters")
    return "".join(parts)


def main() -> None:
    """Render the task on standard input."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        answer = {"text": render(json.load(sys.stdin))}
    except MemoryError:
        answer = {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:  # a stranger's template may raise anything
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
