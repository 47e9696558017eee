"""The text of PDF files. They come from anywhere, so a process of its own reads each one.

That process may fail, hang or grow: it has limits on time and memory, and nobody else notices.
Its main, `python -m cairn.server.pdf_text`, turns standard input into text on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response

from cairn.server.api_error import ApiError

_SECONDS = 60.0
_MOST_WAITING = 8  # files, the one that is read included
_MEMORY = 2 * 2**30  # bytes of address space
_REFUSED, _MISSING = 3, 4  # exit codes: not readable as a PDF, pypdf is not installed


def add_pdf_route(app: FastAPI) -> None:
    one_at_a_time = asyncio.Lock()
    waiting = 0

    @app.post("/pdf-text", include_in_schema=False)
    async def pdf_text(request: Request) -> Response:
        nonlocal waiting
        if waiting >= _MOST_WAITING:
            told = f"{waiting} PDF files wait to be read; send it again later"
            raise ApiError(429, told, code="too_many_requests", retry_after=5)
        waiting += 1
        try:
            data = await request.body()
            async with one_at_a_time:
                return PlainTextResponse(await extract(data))
        finally:
            waiting -= 1


async def extract(data: bytes) -> str:
    """The text layer of a PDF file. Raises ApiError if there is none."""
    if b"%PDF-" not in data[:1024]:
        raise ApiError(400, "this is not a PDF file: it does not begin with %PDF-")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cairn.server.pdf_text"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            out, _ = await process.communicate(data)
    except TimeoutError as error:
        told = f"the PDF file was not read after {_SECONDS:g} s; send its text instead"
        raise ApiError(400, told) from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = out.decode("utf-8", "replace")
    if process.returncode == _MISSING:
        raise ApiError(400, "this server cannot read PDF files: install pypdf on it")
    if process.returncode:
        raise ApiError(400, f"the PDF file cannot be read: {text[:200] or 'it is damaged'}")
    if not text.strip():
        raise ApiError(400, "the PDF file has no text, only pictures; use one with a text layer")
    return text


def _main() -> int:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        import pypdf
    except ImportError:
        return _MISSING
    # Damaged files raise errors of many kinds. Whatever it is, this file cannot be read.
    try:
        reader = pypdf.PdfReader(io.BytesIO(sys.stdin.buffer.read()))
        pages = [page.extract_text() for page in reader.pages]
    except Exception as error:
        sys.stdout.write(f"{type(error).__name__}: {error}")
        return _REFUSED
    sys.stdout.buffer.write("\n\n".join(pages).encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
