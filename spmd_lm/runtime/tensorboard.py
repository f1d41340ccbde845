"""Scalars in TensorBoard's format: one event file per attempt.

A file is TFRecords: length, checksum, an Event in protobuf's encoding, checksum.  Written by hand, because packages
that write it import torch or grpc, which takes seconds.  An attempt first records its first step: TensorBoard then
drops earlier files' records from there on.

Sources: tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto, tsl/lib/io/record_writer.h."""

import math
import struct
import time
from collections.abc import Mapping
from pathlib import Path

FLOAT32_MAX = 3.4028234663852886e38
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types


def make_crc32c_table() -> tuple[int, ...]:
    """CRC-32C of the 256 bytes: Castagnoli polynomial, bits reflected."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


CRC32C_TABLE = make_crc32c_table()


def masked_crc32c(data: bytes) -> int:
    """The checksum of a TFRecord, rotated so that data which contains checksums is protected as well."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def encode_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))))


def encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_field(number: int, wire_type: int, payload: bytes) -> bytes:
    size = encode_varint(len(payload)) if wire_type == BYTES else b""
    return encode_varint(number << 3 | wire_type) + size + payload


def encode_scalar(tag: str, value: float) -> bytes:
    """A Summary.Value.  simple_value is a float32; larger values become infinite."""
    narrowed = value if math.isnan(value) or abs(value) <= FLOAT32_MAX else math.copysign(math.inf, value)
    return encode_field(1, BYTES, tag.encode()) + encode_field(2, FIXED32, struct.pack("<f", narrowed))


def encode_event(step: int, number: int, payload: bytes) -> bytes:
    """An Event with the current time.  number: field of `payload`, 3 file_version, 5 summary or 7 session_log."""
    wall_time = encode_field(1, FIXED64, struct.pack("<d", time.time()))
    return wall_time + encode_field(2, VARINT, encode_varint(step)) + encode_field(number, BYTES, payload)


class EventFile:
    """A new event file in `directory`.  first_step: invalidates earlier files from there on."""

    def __init__(self, directory: Path, first_step: int):
        directory.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names; the number separates starts within one second.
        number = len(list(directory.glob("*tfevents*")))
        self.path = directory / f"events.out.tfevents.{int(time.time()):010}.{number:06}"
        self._file = open(self.path, "xb")  # noqa: SIM115
        self._write(encode_event(0, 3, b"brain.Event:2"))
        self._write(encode_event(first_step, 7, encode_field(1, VARINT, encode_varint(1))))  # SessionLog.START

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = (encode_field(1, BYTES, encode_scalar(tag, value)) for tag, value in scalars.items())
        self._write(encode_event(step, 5, b"".join(values)))

    def _write(self, event: bytes) -> None:
        self._file.write(encode_record(event))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
