"""A program that reads a tokenizer.json on standard input and uses it once, within bounds of memory and time.

Such a file can make Hugging Face's library, which is Rust, abort the process, run for hours or fill the memory.  Exits
with 0 if none of these happens; otherwise prints the problem."""

import resource
import signal
import sys
from contextlib import suppress

MAX_MEMORY, MAX_SECONDS = 2**31, 4  # bytes of address space; CPU seconds: a file of 29 MB took 0.6

SAMPLE = "The naïve fox, 12345 déjà-vu!\n\tdef f(x):\r\n    return x  # 漢字 🙂\n" + "a" * 64
SAMPLE += "".join(map(chr, range(1, 256)))


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # meant for the run
        signal.signal(number, signal.SIG_IGN)
    for which, most in {"RLIMIT_CORE": 0, "RLIMIT_AS": MAX_MEMORY, "RLIMIT_CPU": MAX_SECONDS}.items():
        limit(getattr(resource, which), most)
    text = sys.stdin.buffer.read().decode()
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(text)
    except BaseException as error:  # a panic of Rust is no Exception
        print(error)
        return 1
    try:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        (encoding,) = tokenizer.encode_batch_fast([SAMPLE], add_special_tokens=False)
        tokenizer.decode(encoding.ids, skip_special_tokens=False)
    except Exception:
        return 0  # it does not know some characters of SAMPLE; the run's own text may have none of them
    except BaseException as error:
        print(error)
        return 1
    return 0


def limit(which: int, most: int) -> None:
    """Sets a resource limit if the system has it: macOS has none on address space."""
    _, highest = resource.getrlimit(which)
    with suppress(OSError, ValueError):
        resource.setrlimit(which, (most if highest == resource.RLIM_INFINITY else min(most, highest), highest))


if __name__ == "__main__":
    sys.exit(main())
