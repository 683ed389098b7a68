//! Which parts of an image are holes: a client that leaves them out loses nothing.

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    let tools = &[Need::NbdCopy, Need::QemuImg, Need::PunchAndZero];
    all([
        per_backend(ALL, "nbdinfo_map", &[Need::NbdInfo, Need::PunchAndZero], map_by_nbdinfo),
        per_backend(ALL, "copies_after_unflushed_writes", tools, copies),
        trial("extents/answers", &[Need::PunchAndZero], answers),
    ])
}

/// A connection to `vol` that chose `base:allocation`, and the context's id.
fn connect(server: &Server) -> Res<(Client, u32)> {
    let mut client = server.greeted()?;
    check!(client.option(opt::STRUCTURED_REPLY, &[])? == rep::ACK, "structured replies");
    client.send_option(opt::SET_META_CONTEXT, &query("vol", "base:allocation"))?;
    let (kind, data) = client.option_reply(opt::SET_META_CONTEXT)?;
    check!(kind == rep::META_CONTEXT && &data[4..] == b"base:allocation", "{kind:#x} {data:x?}");
    let (kind, _) = client.option_reply(opt::SET_META_CONTEXT)?;
    check!(kind == rep::ACK, "after the context: {kind:#x}");
    client.go("vol")?;
    Ok((client, be32(&data)))
}

fn query(name: &str, query: &str) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
    [text(name), 1_u32.to_be_bytes().to_vec(), text(query)].concat()
}

/// Length and flags.
type Extent = (u32, u32);

const HOLE: u32 = 3;

/// One request's answer, checked for what every answer has to be.
fn status(client: &mut Client, id: u32, flags: u16, offset: u64, len: u32) -> Res<Vec<Extent>> {
    let cookie = client.request(flags, cmd::BLOCK_STATUS, offset, len)?;
    let reply = client.chunk()?;
    check!(reply.cookie == cookie && reply.done, "{reply:x?}");
    check!(reply.kind == chunk::BLOCK_STATUS, "{reply:x?}");
    extents(&reply.payload, id, len)
}

fn extents(payload: &[u8], id: u32, len: u32) -> Res<Vec<Extent>> {
    check!(payload.len() >= 12 && payload.len() % 8 == 4, "{} bytes", payload.len());
    check!(be32(payload) == id, "context {}", be32(payload));
    let found: Vec<Extent> =
        payload[4..].chunks_exact(8).map(|e| (be32(e), be32(&e[4..]))).collect();
    check!(found.iter().all(|&(len, flags)| len > 0 && (flags == 0 || flags == HOLE)), "{found:?}");
    check!(found.windows(2).all(|two| two[0].1 != two[1].1), "not merged: {found:?}");
    let sum: u64 = found.iter().map(|&(len, _)| u64::from(len)).sum();
    check!(sum <= u64::from(len), "{sum} bytes of {len}: {found:?}");
    Ok(found)
}

/// The map that nbdinfo prints has the holes of the file.
fn map_by_nbdinfo(lab: &Lab, backend: Backend) -> Res {
    let server = Launch::new(lab, backend).sparse(16 * MIB)?.start()?;
    let mut client = server.client()?;
    client.write(4 * MIB, &vec![7; MIB as usize], 0)?.ok("write")?;
    client.write(15 * MIB, &vec![7; MIB as usize], 0)?.ok("write")?;
    let text = lab.run_ok(Command::new("nbdinfo").args(["--map", &server.uri("vol")]))?;
    // Offset, length, flags in decimal, and in words.
    let found: Vec<Vec<u64>> = text
        .lines()
        .map(|l| l.split_whitespace().take(3).filter_map(|word| word.parse().ok()).collect())
        .collect();
    let wanted = [[0, 4 * MIB, 3], [4 * MIB, MIB, 0], [5 * MIB, 10 * MIB, 3], [15 * MIB, MIB, 0]];
    check!(found == wanted, "{text}");
    let totals = lab.run_ok(Command::new("nbdinfo").args([
        "--map=base:allocation",
        "--totals",
        &server.uri("vol"),
    ]))?;
    check!(totals.contains("14680064") && totals.contains("2097152"), "{totals}");
    server.stop()
}

/// nbdcopy and qemu-img leave out what they are told is a hole. Straight after writes without a FLUSH
/// what they copy is the same as what was written.
fn copies(lab: &Lab, backend: Backend) -> Res {
    const SIZE: u64 = 16 * MIB;
    let (image, model) = (lab.path("a.img"), lab.path("model.img"));
    image::sparse(&image, SIZE)?;
    let server = Launch::new(lab, backend).image(&image).start()?;
    let (mut client, uri) = (server.client()?, server.uri("vol"));
    let mut random = Random::new(32);
    let file = image::sparse(&model, SIZE)?;
    let (by_nbdcopy, by_qemu) = (lab.path("nbdcopy.img"), lab.path("qemu.img"));
    for _ in 0..2 {
        for _ in 0..20 {
            let offset = random.below(SIZE / 4096 - 16) * 4096;
            let len = (1 + random.below(16)) * 4096;
            let bytes = random.bytes(len as usize);
            client.write(offset, &bytes, 0)?.ok("write")?;
            file.write_all_at(&bytes, offset)?;
        }
        lab.run_ok(Command::new("nbdcopy").arg(&uri).arg(&by_nbdcopy))?;
        image::same(&model, &by_nbdcopy)?;
        for _ in 0..20 {
            let offset = random.below(SIZE / 4096) * 4096;
            let bytes = random.bytes(4096);
            client.write(offset, &bytes, 0)?.ok("write")?;
            file.write_all_at(&bytes, offset)?;
        }
        let convert = ["convert", "-f", "raw", "-O", "raw", &uri];
        lab.run_ok(Command::new("qemu-img").args(convert).arg(&by_qemu))?;
        image::same(&model, &by_qemu)?;
    }
    // They did leave something out.
    for copy in [&by_nbdcopy, &by_qemu] {
        let bytes = fs::metadata(copy)?.blocks() * 512;
        check!(bytes < SIZE, "nothing was left out");
    }
    let text =
        lab.run_ok(Command::new("qemu-img").args(["map", "-f", "raw", "--output=json", &uri]))?;
    check!(text.contains("\"data\": false") && text.contains("\"data\": true"), "{text}");
    server.stop()
}

/// BLOCK_STATUS is refused to a client that did not choose the context, and for an empty range or one past the end.
/// With REQ_ONE the answer has one extent. A block that another client has just written is data until a TRIM.
fn answers(lab: &Lab) -> Res {
    let server = Launch::threads(lab).sparse(MIB)?.start()?;
    let mut plain = server.client()?;
    plain.plain(cmd::BLOCK_STATUS, 0, 0, 4096)?.is(err::EINVAL, "with simple replies")?;
    plain.read(0, 512)?.map_err(|e| format!("goes on: {e}"))?;

    let error = |client: &mut Client, flags, offset, len| -> Res<u32> {
        let cookie = client.request(flags, cmd::BLOCK_STATUS, offset, len)?;
        let reply = client.chunk()?;
        check!(reply.kind == chunk::ERROR && reply.cookie == cookie && reply.done, "{reply:x?}");
        Ok(be32(&reply.payload))
    };
    let (mut client, id) = connect(&server)?;
    for (flags, offset, len) in [(0, 0, 0), (0, MIB, 1), (0, 0, MIB as u32 + 1), (flag::DF, 0, 1)] {
        let found = error(&mut client, flags, offset, len)?;
        check!(found == err::EINVAL, "{flags} {offset} {len}: {found}");
    }
    let mut hole = |flags| status(&mut client, id, flags, 0, MIB as u32);
    check!(hole(0)? == [(MIB as u32, HOLE)], "an empty image is a hole");
    plain.write(300 << 10, &[9], 0)?.ok("write")?;
    let written = [(300 << 10, HOLE), (4096, 0), ((MIB as u32) - (304 << 10), HOLE)];
    check!(hole(0)? == written, "{:?} after a write of a byte", hole(0)?);
    check!(hole(flag::REQ_ONE)? == written[..1], "REQ_ONE: {:?}", hole(flag::REQ_ONE)?);
    plain.plain(cmd::TRIM, 0, 0, MIB)?.ok("TRIM")?;
    check!(hole(0)? == [(MIB as u32, HOLE)], "{:?} after a TRIM", hole(0)?);
    // For another export; one that is unknown; no query.
    for data in
        [query("", "base:allocation"), query("nope", "base:allocation"), query("vol", "x:y")]
    {
        let mut client = server.greeted()?;
        client.option(opt::STRUCTURED_REPLY, &[])?;
        client.send_option(opt::SET_META_CONTEXT, &data)?;
        loop {
            match client.option_reply(opt::SET_META_CONTEXT)?.0 {
                rep::META_CONTEXT => {}
                rep::ACK | rep::ERR_UNKNOWN => break,
                kind => fail!("{kind:#x}"),
            }
        }
        client.go("vol")?;
        let found = error(&mut client, 0, 0, 4096)?;
        check!(found == err::EINVAL, "without the context: {found}");
    }
    server.stop()
}
