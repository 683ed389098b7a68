//! Which parts of an image are holes: a client that leaves them out loses nothing.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;

use libtest_mimic::Trial;

use crate::client::{Client, MIB, be32, chunk, cmd, err, flag, opt, rep};
use crate::image::{self, Random};
use crate::lab::{Backend, Lab, Res, check, fail, per_backend, trial};
use crate::need::Need;
use crate::server::{Launch, Server};

pub(crate) fn trials() -> Vec<Trial> {
    let all = &Backend::ALL;
    let holes = &[Need::PunchAndZero];
    let mut trials = Vec::new();
    trials.extend(per_backend(all, "extents_after_unflushed_writes", holes, unflushed));
    trials.extend(per_backend(
        all,
        "nbdinfo_map",
        &[Need::NbdInfo, Need::PunchAndZero],
        map_by_nbdinfo,
    ));
    let tools = &[Need::NbdCopy, Need::QemuImg, Need::PunchAndZero];
    trials.extend(per_backend(all, "copies_after_unflushed_writes", tools, copies));
    trials.push(trial("extents/refusals", &[], refusals));
    trials
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

/// The whole map, as a client asks for it: from where the last answer ended. Returns for each block
/// whether it is said to be a hole.
fn map(client: &mut Client, id: u32, size: u64) -> Res<Vec<bool>> {
    let (mut at, mut blocks) = (0, Vec::new());
    while at < size {
        for (len, flags) in status(client, id, 0, at, (size - at) as u32)? {
            check!(len % 4096 == 0, "an extent of {len} bytes");
            blocks.extend((0..len / 4096).map(|_| flags == HOLE));
            at += u64::from(len);
        }
    }
    Ok(blocks)
}

/// Random writes to a sparse image, some from another connection: what was written a moment ago is no
/// hole, what was never written mostly is one, and what is trimmed becomes one.
fn unflushed(lab: &Lab, backend: Backend) -> Res {
    const SIZE: u64 = 32 * MIB;
    let image = lab.path("a.img");
    image::sparse(&image, SIZE)?;
    let server = Launch::new(lab, backend).image(&image).start()?;
    let ((mut client, id), mut writer) = (connect(&server)?, server.client()?);
    check!(map(&mut client, id, SIZE)?.iter().all(|&hole| hole), "an empty image is a hole");
    let one = status(&mut client, id, flag::REQ_ONE, MIB, MIB as u32)?;
    check!(one == [(MIB as u32, HOLE)], "{one:?}");

    let mut random = Random::new(31);
    let mut written = vec![false; (SIZE / 4096) as usize];
    for round in 0..200 {
        // Far apart, so that the file system leaves holes between.
        let block = random.below(SIZE / (256 << 10)) * 64;
        let count = 1 + random.below(16);
        let (offset, len) = (block * 4096, count * 4096);
        match round % 4 {
            3 if round > 100 => {
                writer.plain(cmd::TRIM, 0, offset, len)?.ok("trim")?;
                written[block as usize..][..count as usize].fill(false);
            }
            2 if backend != Backend::Aio => {
                // One byte of the last block.
                writer.write(offset + len - 7, &[9], 0)?.ok("write")?;
                written[(block + count - 1) as usize] = true;
            }
            _ => {
                writer.write(offset, &random.bytes(len as usize), 0)?.ok("write")?;
                written[block as usize..][..count as usize].fill(true);
            }
        }
        let found = status(&mut client, id, 0, offset, len as u32)?;
        let mut at = block as usize;
        for (len, flags) in found {
            for here in &written[at..][..len as usize / 4096] {
                check!(!here || flags == 0, "round {round}: a block at {at} was written");
                at += 1;
            }
        }
    }
    let blocks = map(&mut client, id, SIZE)?;
    check!(blocks.len() == written.len(), "{} blocks", blocks.len());
    let lost = blocks.iter().zip(&written).filter(|&(hole, data)| *hole && *data).count();
    check!(lost == 0, "{lost} blocks that were written are holes");
    let told = blocks.iter().filter(|&&hole| hole).count();
    let really = written.iter().filter(|&&data| !data).count();
    check!(told > really / 2, "only {told} of {really} blocks that were never written are holes");
    let one = status(&mut client, id, flag::REQ_ONE, 0, SIZE as u32)?;
    check!(one.len() == 1, "REQ_ONE: {one:?}");
    server.stop()
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

/// Who did not choose the context, or asks for nothing, or past the end.
fn refusals(lab: &Lab) -> Res {
    let server = Launch::new(lab, Backend::Threads).sparse(MIB)?.start()?;
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
    check!(!status(&mut client, id, 0, 1, 4095)?.is_empty(), "it goes on");
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
