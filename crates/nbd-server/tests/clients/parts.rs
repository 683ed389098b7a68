//! Options of one image: a part of a file as an export, and an export that cannot be written to.

use std::fs;
use std::process::Command;

use libtest_mimic::Trial;

use crate::client::MIB;
use crate::image;
use crate::lab::{Backend, Lab, Res, check, per_backend, trial};
use crate::need::Need;
use crate::server::Launch;

const EPERM: u32 = 1;
const ENOSPC: u32 = 28;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = per_backend(&Backend::ALL, "part_of_a_file", &[Need::NbdCopy], part);
    trials.push(trial("images/readonly_option", &[], read_only));
    trials.push(trial("images/wrong_options", &[], wrong));
    trials
}

/// What clients read, write and discard lies where the part begins, and nothing beside the part changes; with
/// and without blocks in memory.
fn part(lab: &Lab, backend: Backend) -> Res {
    // With O_DIRECT a device may take blocks of 4 KiB only; otherwise nothing here is a multiple of one.
    let unit = if backend == Backend::Aio { 4096 } else { 100 };
    let (offset, len) = (MIB + 3 * unit, MIB + unit);
    for cache in ["0", "1M"] {
        let (path, back) = (lab.path("a.img"), lab.path("back.img"));
        image::with_parts(&path, 4 * MIB, 64, 9)?;
        let mut expected = fs::read(&path)?;
        let (start, end) = (offset as usize, (offset + len) as usize);
        let spec = format!("vol={},offset={offset},size={len}", path.display());
        let mut launch = Launch::bare(lab).arg("--image").arg(spec).on_socket("s");
        for arg in backend.args() {
            launch = launch.arg(arg);
        }
        let server = launch.image_as("all", &path).arg("--cache").arg(cache).start()?;
        // libnbd checks the offsets of structured replies.
        let copy = |from: &str, to: &str| lab.run_ok(Command::new("nbdcopy").args([from, to]));
        let back_text = back.to_str().expect("temporary paths are UTF-8");
        copy(&server.uri("vol"), back_text)?;
        check!(fs::read(&back)? == expected[start..end], "--cache {cache}: other bytes were read");

        let mut client = server.client()?;
        check!(client.export.size == len, "{} bytes", client.export.size);
        let (data, last) = (vec![0x6b; 2 * unit as usize], len - 2 * unit);
        client.write(last, &data, 0)?.ok("write")?;
        client.write(unit, &data[unit as usize..], 0)?.ok("write")?;
        client.plain(6, 0, 4 * unit, 64 * unit)?.ok("write zeroes")?;
        client.write(last + unit, &data, 0)?.is(ENOSPC, "a write behind the part")?;
        expected[end - data.len()..end].fill(0x6b);
        expected[start + unit as usize..][..unit as usize].fill(0x6b);
        expected[start + 4 * unit as usize..][..64 * unit as usize].fill(0);
        check!(client.read(last, data.len() as u32)? == Ok(data), "what was written");
        // Another export of the same file shows the same bytes.
        let seen = server.client_of("all")?.read(offset, len as u32)?;
        check!(seen.as_deref() == Ok(&expected[start..end]), "--cache {cache}: by the other name");
        client.disconnect()?;
        copy(back_text, &server.uri("vol"))?;
        expected[start..end].copy_from_slice(&fs::read(&back)?);
        server.stop()?;
        check!(fs::read(&path)? == expected, "--cache {cache}: other bytes of the file changed");
    }
    Ok(())
}

/// One name for writing, one for reading, in either order.
fn read_only(lab: &Lab) -> Res {
    let path = lab.path("a,b.img");
    image::sparse(&path, MIB)?;
    let escaped = path.to_str().expect("temporary paths are UTF-8").replace(',', ",,");
    let (write, read) = (format!("w={escaped}"), format!("r={escaped},readonly"));
    for (first, second) in [(&write, &read), (&read, &write)] {
        let launch = Launch::bare(lab).on_socket("s").arg("--image").arg(first);
        let server = launch.arg("--image").arg(second).start()?;
        let (mut writer, mut reader) = (server.client_of("w")?, server.client_of("r")?);
        writer.write(0, &[3; 4096], 0)?.ok("write")?;
        check!(reader.read(0, 4096)? == Ok(vec![3; 4096]), "the reader sees other bytes");
        reader.write(0, &[4; 4096], 0)?.is(EPERM, "a write to the export for reading")?;
        server.stop()?;
    }
    // Without a name for writing the file is not even opened for it, nor locked for it.
    let launch = |socket| {
        let launch = Launch::bare(lab).on_socket(socket).arg("--image").arg(&read);
        launch.start()
    };
    let (first, second) = (launch("s")?, launch("s2")?);
    first.stop()?;
    second.stop()
}

fn wrong(lab: &Lab) -> Res {
    let path = lab.path("a.img");
    image::sparse(&path, MIB)?;
    let refused = |options: &str, code: i32, named: &str| -> Res {
        let spec = format!("{},{options}", path.display());
        let launch = Launch::bare(lab).on_socket("s").arg("--image").arg(spec);
        let launch = if options.contains("513") { launch.arg("--direct") } else { launch };
        let (found, log) = launch.start_refused()?;
        check!(found == code && log.contains(named), "{options}: {found}\n{log}");
        Ok(())
    };
    refused("offset=2M", 1, "1048576 bytes")?;
    refused("offset=4096,size=1M", 1, "offset 4096")?;
    refused("size=1048577", 1, "1048577 bytes")?;
    refused("offset=x", 2, "'x' is not a size")?;
    refused("write", 2, "'write' is not an option")?;
    if crate::need::first_missing(&[Need::Direct]).is_none() {
        refused("offset=513", 1, "not a multiple of")?;
    }
    Ok(())
}
