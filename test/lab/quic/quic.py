"""QUIC between guests: `quic.py server ADDRESS PORT` sends back what `quic.py client ADDRESS PORT
BYTES` sends it, on one stream. The server says when it listens, the client prints JSON."""

import asyncio
import datetime
import json
import random
import ssl
import sys

from aioquic.asyncio import connect, serve
from aioquic.quic.configuration import QuicConfiguration
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

PROTOCOLS = ["echo"]
CHUNK_BYTES = 65536


def certificate():
    """Of nobody, for years around the guest's idea of now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "guest")])
    now, years = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=3650)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(now - years).not_valid_after(now + years)
    return builder.sign(key, hashes.SHA256()), key


async def echo(reader, writer):
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def server(address, port):
    tasks = set()

    def start(reader, writer):
        tasks.add(asyncio.get_running_loop().create_task(echo(reader, writer)))

    configuration = QuicConfiguration(is_client=False, alpn_protocols=PROTOCOLS)
    configuration.certificate, configuration.private_key = certificate()
    await serve(address, port, configuration=configuration, stream_handler=start)
    print("listening", flush=True)
    await asyncio.Future()


async def client(address, port, length):
    configuration = QuicConfiguration(is_client=True, alpn_protocols=PROTOCOLS)
    configuration.verify_mode = ssl.CERT_NONE
    content = random.Random(length).randbytes(length)
    async with connect(address, port, configuration=configuration) as connection:
        reader, writer = await connection.create_stream()
        writer.write(content)
        writer.write_eof()
        echoed = await reader.read()
    print(json.dumps({"bytes": len(echoed), "same": echoed == content}))


what, address, port, *rest = sys.argv[1:]
if what == "server":
    asyncio.run(server(address, int(port)))
else:
    asyncio.run(client(address, int(port), int(rest[0])))
