//! nbdinfo reads every field of an export; qemu-io reads, writes, discards, zeroes and flushes.

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        per_backend(ALL, "nbdinfo_every_field", &[Need::NbdInfo], every_field),
        trial("nbdinfo_lists_exports", &[Need::NbdInfo], lists_exports),
        per_backend(ALL, "qemu_io_patterns", &[Need::QemuIo], patterns),
        per_backend(ALL, "qemu_io_discard_and_zeroes", &[Need::QemuIo], discard),
        per_backend(ALL, "qemu_io_many_in_flight", &[Need::QemuIo], many_in_flight),
    ])
}

fn nbdinfo(lab: &Lab, args: &[&str]) -> Res<String> {
    lab.run_ok(Command::new("nbdinfo").args(args))
}

/// The value of `"name": value` in nbdinfo's JSON, which has one field per line.
fn field<'a>(json: &'a str, name: &str) -> Option<&'a str> {
    let start = json.find(&format!("\"{name}\":"))? + name.len() + 3;
    let line = json[start..].lines().next()?;
    Some(line.trim().trim_end_matches(',').trim_matches('"'))
}

fn check_fields(json: &str, wanted: &[(&str, &str)]) -> Res {
    for &(name, value) in wanted {
        let found = field(json, name);
        check!(found == Some(value), "{name} is {found:?}, wanted {value}\n{json}");
    }
    Ok(())
}

/// Every field that nbdinfo prints, as JSON and as text, and its one-question forms.
fn every_field(lab: &Lab, backend: Backend) -> Res {
    let server = Launch::new(lab, backend).parts(48 * MIB, 4, 1)?.start()?;
    let uri = server.uri("vol");

    let json = nbdinfo(lab, &["--json", "--no-content", &uri])?;
    check_fields(
        &json,
        &[
            ("protocol", "newstyle-fixed"),
            ("TLS", "false"),
            ("structured", "true"),
            ("export-name", "vol"),
            ("is_rotational", "false"),
            ("is_read_only", "false"),
            ("can_cache", "false"),
            ("can_df", "true"),
            ("can_fast_zero", "true"),
            ("can_flush", "true"),
            ("can_fua", "true"),
            ("can_multi_conn", "true"),
            ("can_trim", "true"),
            ("can_zero", "true"),
            ("block_size_maximum", &MAX_PAYLOAD.to_string()),
            ("export-size", &(48 * MIB).to_string()),
        ],
    )?;
    let size = |name| field(&json, name).and_then(|v| v.parse::<u32>().ok()).unwrap_or(0);
    let (minimum, preferred) = (size("block_size_minimum"), size("block_size_preferred"));
    check!(minimum.is_power_of_two() && minimum <= 4096, "minimum block size {minimum}");
    check!((backend == Backend::Aio) == (minimum >= 512), "minimum block size {minimum}");
    check!(preferred.is_power_of_two() && preferred >= 4096, "preferred block size {preferred}");

    let text = nbdinfo(lab, &["--no-content", &uri])?;
    check!(text.contains("newstyle-fixed without TLS, using structured packets"), "{text}");
    check!(nbdinfo(lab, &["--size", &uri])?.trim() == (48 * MIB).to_string(), "--size");
    for question in ["df", "fast-zero", "flush", "fua", "multi-conn", "trim", "write", "zero"] {
        nbdinfo(lab, &["--can", question, &uri])?; // exits 0 for yes
    }
    let is = lab.run(Command::new("nbdinfo").args(["--is", "read-only", &uri]))?;
    check!(is.status.code() == Some(2), "--is read-only: {} {}", is.status, is.text);
    server.stop()
}

/// Two exports by name; the first one is also the default.
fn lists_exports(lab: &Lab) -> Res {
    let (a, b) = (lab.path("a.img"), lab.path("b.img"));
    image::sparse(&a, 8 * MIB)?;
    image::sparse(&b, 16 * MIB)?;
    // The second has no name: that of the file.
    let server = Launch::threads(lab).image_as("first", &a).arg("--image").arg(&b).start()?;
    let list = nbdinfo(lab, &["--list", "--json", "--no-content", &server.uri("")])?;
    for name in ["first", "b.img"] {
        check!(list.contains(&format!("\"export-name\": \"{name}\"")), "no {name} in {list}");
    }
    for (name, size) in [("", 8), ("first", 8), ("b.img", 16)] {
        let text = nbdinfo(lab, &["--size", &server.uri(name)])?;
        check!(text.trim() == (size * MIB).to_string(), "size of {name:?}: {text}");
    }
    server.stop()
}

/// Runs qemu-io with the given commands on export `vol`; a wrong pattern fails it.
fn qemu_io(lab: &Lab, server: &Server, commands: &[&str]) -> Res<String> {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "raw"]);
    for c in commands {
        command.args(["-c", c]);
    }
    let text = lab.run_ok(command.arg(server.uri("vol")))?;
    // qemu-io 7 ends with 0 after some failures that it only prints.
    let bad = ["failed", "error", "Error"].iter().any(|word| text.contains(word));
    check!(!bad, "qemu-io {commands:?}:\n{text}");
    Ok(text)
}

/// Patterns written through the server, with FUA and without, lie in the file, and come back through it.
fn patterns(lab: &Lab, backend: Backend) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, 64 * MIB)?;
    let server = Launch::new(lab, backend).image(&image).start()?;
    qemu_io(
        lab,
        &server,
        &[
            "write -P 0xa5 0 64k",
            "write -P 0x5a 60k 8k",       // overlaps the first
            "write -P 0x11 33550336 4k",  // at the payload limit less one block
            "write -P 0x77 63M 1M",       // up to the very end
            "write -P 0x33 1234567 4321", // unaligned: qemu does what --direct demands
            "read -P 0xa5 0 60k",
            "read -P 0x5a 60k 8k",
            "read -P 0 68k 1M",
            "read -P 0x33 1234567 4321",
            "read -P 0x77 63M 1M",
            "write -f -P 0x42 16M 4k", // with FUA; that it reaches the disk: `durability`
            "write -f -P 0x43 17M 2M",
            "write -f -z 18M 64k",
            "flush",
            "read -P 0x42 16M 4k",
            "read -P 0x43 17M 1M",
            "read -P 0 18M 64k",
        ],
    )?;
    // A second client sees the same.
    qemu_io(lab, &server, &["read -P 0x5a 60k 8k", "read -P 0x33 1234567 4321"])?;
    server.stop()?;
    for (offset, len, byte) in [
        (0u64, 60 << 10, 0xa5u8),
        (60 << 10, 8 << 10, 0x5a),
        (33_550_336, 4096, 0x11),
        (63 * MIB, 1 << 20, 0x77),
        (1_234_567, 4321, 0x33),
        (1_238_888, 4096, 0),
    ] {
        let bytes = image::bytes_at(&image, offset, len)?;
        check!(bytes.iter().all(|&b| b == byte), "the file at {offset} is not all {byte:#x}");
    }
    Ok(())
}

/// A discarded range reads as zeroes and is a hole; zeroed ranges read as zeroes. Zeroes without `-u` stay allocated,
/// and a hole becomes allocated. Fast zeroes (`-n`) and discards may be longer than a payload.
fn discard(lab: &Lab, backend: Backend) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, 128 * MIB)?;
    let server = Launch::new(lab, backend).image(&image).start()?;
    qemu_io(lab, &server, &["write -P 0xee 0 16M", "flush"])?;
    let full = image::allocated(&image)?;
    qemu_io(
        lab,
        &server,
        &[
            "discard 4M 4M",
            "write -z -u 8M 2M", // may unmap
            "write -z 10M 2M",   // must stay allocated
            "write -z 12k 8k",
            "read -P 0xee 0 12k",
            "read -P 0 12k 8k",
            "read -P 0xee 20k 1M",
            "read -P 0 4M 8M",
            "read -P 0xee 12M 4M",
        ],
    )?;
    let punches = crate::need::first_missing(&[Need::PunchAndZero]).is_none();
    let now = image::allocated(&image)?;
    if punches {
        qemu_io(lab, &server, &["write -z 16M 4M"])?;
        let more = image::allocated(&image)?.saturating_sub(now);
        check!(more >= 4 * MIB, "zeroes over a hole allocated {more} bytes");
        let fast = ["write -P 0xee 20M 1M", "write -z -u -n 20M 104M", "read -P 0 20M 1M"];
        qemu_io(lab, &server, &fast)?;
        qemu_io(lab, &server, &["discard 16M 112M"])?;
    }
    server.stop()?;
    if punches {
        let all = image::allocated(&image)?;
        check!(all <= now, "a long discard left {} bytes", all - now);
        let freed = full.saturating_sub(now);
        check!(freed >= 5 * MIB, "discard and unmap freed {freed} bytes of {full}");
        check!(freed <= 7 * MIB, "{freed} bytes freed: a write of zeroes without -u punched");
    }
    Ok(())
}

/// qemu-io's asynchronous commands: many requests in flight on one connection.
fn many_in_flight(lab: &Lab, backend: Backend) -> Res {
    let server = Launch::new(lab, backend).sparse(32 * MIB)?.start()?;
    let write = |i: u64| format!("aio_write -q -P {} {}k 64k", 1 + i % 250, i * 64);
    let read = |i: u64| format!("aio_read -q -P {} {}k 64k", 1 + i % 250, i * 64);
    let mut commands: Vec<String> = (0..200).map(write).collect();
    commands.push("aio_flush".to_string());
    commands.extend((0..200).map(read));
    commands.push("aio_flush".to_string());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    qemu_io(lab, &server, &commands)?;
    server.stop()
}
