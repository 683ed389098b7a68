//! Requests that must be refused, each on a session that must stay in step and go on.

use std::net::Shutdown;

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        per_backend(ALL, "out_of_range", &[], out_of_range),
        per_backend(ALL, "payload_over_the_limit", &[], over_the_limit),
        per_backend(ALL, "refused_write_keeps_step", &[], refused_write_keeps_step),
        per_backend(ALL, "structured_reads", &[], structured_reads),
        trial("requests/unknown_command_and_flags", &[], unknown),
        trial("requests/bad_magic_closes", &[], bad_magic),
        per_backend(ALL, "answered_before_a_bad_magic", &[], answered_first),
        per_backend(ALL, "answered_before_half_a_payload", &[], answered_before_half),
        trial("requests/read_only_export", &[], read_only),
        trial("requests/unaligned_under_direct", &[Need::Direct], unaligned),
    ])
}

fn start(lab: &Lab, backend: Backend, size: u64) -> Res<Server> {
    Launch::new(lab, backend).parts(size, 8, 31)?.start()
}

/// The session is in step: a block written comes back.
fn in_step(client: &mut Client) -> Res {
    let data = vec![0x6d; 4096];
    client.write(8192, &data, 0)?.ok("the write after a refusal")?;
    check!(client.read(8192, 4096)? == Ok(data), "out of step after a refusal");
    Ok(())
}

fn out_of_range(lab: &Lab, backend: Backend) -> Res {
    let size = 8 * MIB;
    let server = start(lab, backend, size)?;
    let mut client = server.client()?;
    let ranges = [
        (size, 4096u32),
        (size - 4096, 8192),
        (size + MIB, 4096),
        (u64::MAX - 4095, 4096), // ends exactly at 2^64
        (!4095, 8192),           // wraps around
        (1 << 63, 4096),
    ];
    for (offset, len) in ranges {
        let read = client.read(offset, len)?;
        check!(read == Err(err::EINVAL), "READ of {len} at {offset:#x}: {}", brief(&read));
        let written = client.write(offset, &vec![1; len as usize], 0)?;
        written.is(err::ENOSPC, &format!("WRITE of {len} at {offset:#x}"))?;
        for kind in [cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE] {
            let answer = client.plain(kind, 0, offset, len.into())?;
            answer.any_of(&[err::EINVAL, err::ENOSPC], "a range past the end")?;
        }
        in_step(&mut client)?;
    }
    client.disconnect()?;
    server.stop()
}

/// A READ past the advertised maximum is refused in step; such a WRITE is drained or closes this
/// connection only.
fn over_the_limit(lab: &Lab, backend: Backend) -> Res {
    let mut server = start(lab, backend, 128 * MIB)?;
    let mut client = server.client()?;
    let largest = client.read(0, MAX_PAYLOAD)?;
    check!(largest.is_ok(), "a READ of the maximum itself: {:?}", largest.err());
    drop(largest);
    client.write(0, &vec![0x11; MAX_PAYLOAD as usize], 0)?.ok("a WRITE of the maximum itself")?;
    for len in [MAX_PAYLOAD + 4096, 64 << 20, !4095] {
        let refused = client.read(0, len)?;
        let fine = matches!(refused, Err(err::EINVAL | err::EOVERFLOW));
        check!(fine, "a READ of {len} bytes: {:?}", refused.map(|b| b.len()));
    }
    in_step(&mut client)?;

    let seen = server.log().len();
    let len = MAX_PAYLOAD + 4096;
    let cookie = client.request(0, cmd::WRITE, 0, len)?;
    let sent = client.send(&vec![0x22; len as usize]);
    match sent.and_then(|()| client.answer(cookie)) {
        Ok(answer) => {
            answer.any_of(&[err::EINVAL, err::EOVERFLOW, err::ENOSPC], "an oversized WRITE")?;
            in_step(&mut client)?;
        }
        Err(_) => {
            client.closed()?;
        }
    }
    server.logged_since(seen, "an oversized WRITE")?;
    // 4 GiB announced, nothing sent: refused or closed, and no such buffer is made.
    let mut liar = server.client()?;
    liar.request(0, cmd::WRITE, 0, u32::MAX)?;
    thread::sleep(Duration::from_millis(200));
    let peak = server.memory("VmHWM")?;
    check!(peak < 512 * MIB, "{} MiB for a client that announced 4 GiB", peak / MIB);
    server.still_serves()?;
    let mut fresh = server.client()?;
    let kept = fresh.read(MIB, 4096)?;
    check!(kept == Ok(vec![0x11; 4096]), "a refused WRITE changed the image");
    server.stop()
}

/// Refused and good writes pipelined in one send: each gets its own answer, none is misparsed.
fn refused_write_keeps_step(lab: &Lab, backend: Backend) -> Res {
    let size = 8 * MIB;
    let server = start(lab, backend, size)?;
    let mut client = server.client()?;
    let mut bytes = Vec::new();
    let mut wanted = std::collections::HashMap::new();
    for i in 0..64u64 {
        let good = i % 3 != 0;
        let offset = if good { i * 16384 } else { size + i * 4096 };
        let len = if i % 2 == 0 { 4096u32 } else { 16384 };
        bytes.extend(header(0, cmd::WRITE, i, offset, len));
        // A payload that looks like requests, for a server that forgets to drain it.
        let fake = header(0, cmd::DISC, 0xbad, 0, 0);
        let payload: Vec<u8> = fake.iter().copied().cycle().take(len as usize).collect();
        bytes.extend(payload);
        wanted.insert(i, if good { 0 } else { err::ENOSPC });
    }
    client.send(&bytes)?;
    while !wanted.is_empty() {
        let (Answer(error), cookie) = client.simple_reply()?;
        let expected = wanted.remove(&cookie).ok_or_else(|| format!("cookie {cookie:#x}?"))?;
        check!(error == expected, "write {cookie}: error {error}, wanted {expected}");
    }
    in_step(&mut client)?;
    client.disconnect()?;
    server.stop()
}

/// After STRUCTURED_REPLY every READ is answered in chunks that cover it once; with DF in one;
/// errors too are chunks; other commands keep their simple replies or get a chunk without data.
fn structured_reads(lab: &Lab, backend: Backend) -> Res {
    let server = start(lab, backend, 8 * MIB)?;
    let image = lab.path("a.img");
    let mut client = server.greeted()?;
    let kind = client.option(opt::STRUCTURED_REPLY, &[])?;
    check!(kind == rep::ACK, "STRUCTURED_REPLY: reply {kind:#x}");
    client.go("vol")?;
    let ranges = [(0, 4096u32), (4096, 1 << 20), (7 * MIB, 1 << 20), (0, 8 << 20)];
    for (offset, len) in ranges {
        for flags in [0, flag::DF] {
            let wanted = image::bytes_at(&image, offset, len as usize)?;
            let (bytes, data_chunks) = structured_read(&mut client, flags, offset, len)?;
            check!(bytes == wanted, "READ of {len} at {offset} gave other bytes");
            check!(flags == 0 || data_chunks == 1, "DF, but {data_chunks} chunks");
        }
    }
    let cookie = client.request(0, cmd::READ, 8 * MIB, 4096)?;
    let error = client.chunk()?;
    check!([chunk::ERROR, chunk::ERROR_OFFSET].contains(&error.kind), "{error:?}");
    check!(error.done && error.cookie == cookie, "{error:?}");
    check!(be32(&error.payload) == err::EINVAL, "{error:?}");
    let message = u16::from_be_bytes([error.payload[4], error.payload[5]]);
    let tail = if error.kind == chunk::ERROR { 0 } else { 8 };
    check!(error.payload.len() == 6 + usize::from(message) + tail, "{error:?}");
    // Still in step:
    let (bytes, _) = structured_read(&mut client, 0, 0, 4096)?;
    check!(bytes == image::bytes_at(&image, 0, 4096)?, "out of step after an error chunk");
    client.disconnect()?;
    server.stop()
}

/// Puts a structured READ together; gives the bytes and the number of content chunks.
fn structured_read(client: &mut Client, flags: u16, offset: u64, len: u32) -> Res<(Vec<u8>, u32)> {
    let cookie = client.request(flags, cmd::READ, offset, len)?;
    let mut bytes: Vec<Option<u8>> = vec![None; len as usize];
    let mut chunks = 0;
    loop {
        let part = client.chunk()?;
        check!(part.cookie == cookie, "a chunk of {:#x}", part.cookie);
        let content = match part.kind {
            chunk::OFFSET_DATA => part.payload[8..].to_vec(),
            chunk::OFFSET_HOLE => vec![0; be32(&part.payload[8..]) as usize],
            chunk::NONE if part.done => Vec::new(),
            kind => fail!("a chunk of type {kind:#x}"),
        };
        if part.kind != chunk::NONE {
            chunks += 1;
            let at = be64(&part.payload).checked_sub(offset);
            let at = at.ok_or("a chunk before the range")? as usize;
            let room = bytes.get_mut(at..at + content.len()).ok_or("a chunk past the range")?;
            check!(room.iter().all(Option::is_none), "two chunks for the same bytes");
            room.iter_mut().zip(content).for_each(|(slot, byte)| *slot = Some(byte));
        }
        if part.done {
            let whole: Option<Vec<u8>> = bytes.into_iter().collect();
            return Ok((whole.ok_or("the chunks leave a gap")?, chunks));
        }
    }
}

fn unknown(lab: &Lab) -> Res {
    let server = start(lab, Backend::Threads, 8 * MIB)?;
    let mut client = server.client()?;
    for kind in [7u16, 8, 99, 0xffff] {
        client.plain(kind, 0, 0, 4096)?.is(err::EINVAL, &format!("command {kind}"))?;
        in_step(&mut client)?;
    }
    for flags in [1u16 << 5, 1 << 15] {
        let read = client.read_with_flags(flags, 0, 4096)?;
        check!(read == Err(err::EINVAL), "READ with flags {flags:#x}: {}", brief(&read));
        let written = client.write(0, &[1; 4096], flags)?;
        written.is(err::EINVAL, "WRITE with unknown flags")?;
        in_step(&mut client)?;
    }
    client.disconnect()?;
    server.stop()
}

fn bad_magic(lab: &Lab) -> Res {
    let server = start(lab, Backend::Threads, 8 * MIB)?;
    let mut other = server.client()?;
    let mut client = server.client()?;
    let seen = server.log().len();
    client.send(&[0x17; 28])?;
    client.closed()?;
    server.logged_since(seen, "a request with a bad magic")?;
    in_step(&mut other)?;
    server.serves_to_the_end()
}

/// Requests in the segment of a bad magic, in front of it, are answered; then the connection ends.
fn answered_first(lab: &Lab, backend: Backend) -> Res {
    owed(lab, backend, &[0x17; 28])
}

/// The same where the client shuts its side of the connection inside a WRITE's payload, in one segment
/// and in a payload so long that the server receives it in place.
fn answered_before_half(lab: &Lab, backend: Backend) -> Res {
    let head = |len| header(0, cmd::WRITE, 99, 4 * MIB, len);
    owed(lab, backend, &[&head(4096)[..], &[0x55; 1000]].concat())?;
    owed(lab, backend, &[&head(8 << 20)[..], &[0x55; 1000]].concat())
}

/// Sends ten READs, a WRITE, and `last`, in one piece, and shuts its side. All but `last` must be answered.
fn owed(lab: &Lab, backend: Backend, last: &[u8]) -> Res {
    let server = start(lab, backend, 64 * MIB)?;
    let mut client = server.client()?;
    let mut bytes = Vec::new();
    for cookie in 0..10u64 {
        bytes.extend(header(0, cmd::READ, cookie, cookie * MIB, MIB as u32));
    }
    bytes.extend(header(flag::FUA, cmd::WRITE, 10, 20 * MIB, 4096));
    bytes.extend([0x66; 4096]);
    bytes.extend(last);
    client.send(&bytes)?;
    client.stream.shutdown(Shutdown::Write)?;
    // The replies do not fit the socket's buffer: most are owed when the server sees the end.
    thread::sleep(Duration::from_millis(300));
    let mut answered = [false; 11];
    for _ in 0..11 {
        let (answer, cookie) = client.simple_reply()?;
        answer.ok("a request in front of the end")?;
        if cookie < 10 {
            let wanted = image::bytes_at(&lab.path("a.img"), cookie * MIB, MIB as usize)?;
            check!(client.recv_vec(MIB as usize)? == wanted, "other bytes of READ {cookie}");
        }
        let seen = answered.get_mut(cookie as usize).ok_or("a reply to no request")?;
        check!(!std::mem::replace(seen, true), "two replies to request {cookie}");
    }
    let rest = client.closed()?;
    check!(rest == 0, "{rest} bytes after the last reply");
    server.serves_to_the_end()
}

fn read_only(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::with_parts(&image, 8 * MIB, 8, 32)?;
    let before = fs::read(&image)?;
    let server = Launch::threads(lab).image(&image).arg("--read-only").start()?;
    let mut client = server.client()?;
    check!(client.export.flags & 2 != 0, "not marked read-only: {:#x}", client.export.flags);
    for _ in 0..2 {
        client.write(0, &[1; 65536], 0)?.is(err::EPERM, "WRITE")?;
        client.write(0, &[1; 4096], flag::FUA)?.is(err::EPERM, "WRITE with FUA")?;
        client.plain(cmd::TRIM, 0, 0, MIB)?.is(err::EPERM, "TRIM")?;
        client.plain(cmd::WRITE_ZEROES, 0, 0, MIB)?.is(err::EPERM, "WRITE_ZEROES")?;
        check!(client.read(0, 4096)? == Ok(before[..4096].to_vec()), "READ");
    }
    client.disconnect()?;
    server.stop()?;
    check!(fs::read(&image)? == before, "a read-only image changed");
    Ok(())
}

/// Under `--direct` the minimum block size is the disk's; what does not fit it is refused, and an odd end of the image is
/// not exported.
fn unaligned(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::with_parts(&image, 8 * MIB, 8, 33)?.set_len(8 * MIB + 100)?;
    let server = Launch::threads(lab).image(&image).arg("--direct").start()?;
    let mut client = server.client()?;
    check!(client.export.size == 8 * MIB, "{} bytes", client.export.size);
    server.logged("round")?;
    let minimum = client.export.blocks.ok_or("no block sizes")?.0;
    check!(minimum >= 512, "minimum block size {minimum} under --direct");
    let block = u64::from(minimum);
    for (offset, len) in [(1, minimum), (0, minimum + 1), (block / 2, minimum), (block, 100)] {
        let read = client.read(offset, len)?;
        check!(read == Err(err::EINVAL), "READ of {len} at {offset}: {}", brief(&read));
        let written = client.write(offset, &vec![1; len as usize], 0)?;
        written.is(err::EINVAL, &format!("WRITE of {len} at {offset}"))?;
        in_step(&mut client)?;
    }
    let block = client.read(0, minimum)?;
    check!(block == Ok(image::bytes_at(&image, 0, minimum as usize)?), "an aligned READ");
    client.disconnect()?;
    server.stop()
}
