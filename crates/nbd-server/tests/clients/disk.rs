//! The disk's own troubles: full, shrunk, unable to zero; and holes where they are allowed only.

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        per_backend(BUFFERED, "full_disk_delays_no_other", &[Need::SmallTmpfs], beside_a_full_disk),
        per_backend(ALL, "image_shrinks", &[], image_shrinks),
        per_backend(BUFFERED, "zeroes_without_zero_range", &[Need::NoZeroRange], slow_zero),
    ])
}

/// The start of a command line that runs the rest with a small file system at `mount`.
pub(crate) fn on_small_disk(mount: &Path, size: &str) -> Res<Vec<String>> {
    fs::create_dir(mount)?;
    let script = format!("mount -t tmpfs -o size={size} none \"$0\" && exec \"$@\"");
    let mut words: Vec<String> = need::unshare_mounts().into_iter().map(String::from).collect();
    words.extend(["sh".into(), "-c".into(), script]);
    words.push(mount.to_str().expect("temporary paths are UTF-8").to_string());
    Ok(words)
}

/// Writes to an image on a full disk are refused, and those to another image take as long as before: what
/// cannot be written back does not fill the cache.
fn beside_a_full_disk(lab: &Lab, backend: Backend) -> Res {
    const BLOCK: u64 = 4096;
    let mount = lab.path("small");
    let words = on_small_disk(&mount, "2m")?;
    let healthy = lab.path("healthy.img");
    image::sparse(&healthy, 64 * MIB)?;
    let launch =
        Launch::new(lab, backend).image(&mount.join("a.img")).image_as("healthy", &healthy);
    let launch = launch.with("--size 64M --cache 8M");
    let server = launch.through(words).start()?;
    let (mut full, mut other) = (server.client()?, server.client_of("healthy")?);
    let data = vec![0x3e; BLOCK as usize];
    let mut errors = 0;
    for block in 0..4096 {
        let answer = full.write(block * BLOCK, &data, 0)?;
        answer.any_of(&[0, err::ENOSPC], "a write to the full disk")?;
        errors += u32::from(answer.0 > 0);
        if errors == 8 {
            break;
        }
    }
    check!(errors > 0, "16 MiB fit on a disk of 2 MiB, and a cache of 8 MiB");
    // Each write that had to wait for room in the cache would be late, and not some of them. A read of
    // what is in the cache waits for none: if it is late, so is the machine.
    let is_late = |began: Instant| i32::from(began.elapsed() > Duration::from_secs(1));
    let mut late = 0;
    for block in 0..500 {
        let began = Instant::now();
        other.write(block * BLOCK, &data, 0)?.ok("a write to the healthy image")?;
        late += is_late(began);
        let began = Instant::now();
        check!(other.read(block * BLOCK, BLOCK as u32)? == Ok(data.clone()), "a read of it");
        late -= is_late(began);
        check!(late < 20, "{late} more writes than reads of {} took over 1 s", block + 1);
    }
    other.flush()?.ok("FLUSH of the healthy image")?;
    check!(full.read(0, BLOCK as u32)? == Ok(data), "what the full disk acknowledged");
    full.plain(cmd::TRIM, 0, 0, 64 * MIB)?.ok("TRIM of everything")?;
    server.serves_to_the_end()
}

/// The image loses its tail while it is served: reads there get EIO, the rest goes on.
fn image_shrinks(lab: &Lab, backend: Backend) -> Res {
    let image = lab.path("a.img");
    let file = image::with_parts(&image, 32 * MIB, 64, 11)?;
    let mut server = Launch::new(lab, backend).image(&image).start()?;
    let mut client = server.client()?;
    let start = image::bytes_at(&image, 0, 65536)?;
    check!(client.read(31 * MIB, 65536)?.is_ok(), "before it shrinks");

    file.set_len(MIB)?;
    let gone = client.read(16 * MIB, 65536)?;
    check!(gone == Err(err::EIO), "a read past the new end: {}", brief(&gone));
    let half = client.read(MIB - 32768, 65536)?;
    check!(half == Err(err::EIO), "a read across the new end: {}", brief(&half));
    check!(client.read(0, 65536)? == Ok(start), "the part that is left");
    server.still_serves()?;

    file.set_len(32 * MIB)?;
    check!(client.read(16 * MIB, 65536)? == Ok(vec![0; 65536]), "after it grew back");
    client.disconnect()?;
    server.stop()
}

/// Writes `len` bytes of data at 0 and flushes.
fn fill(client: &mut Client, len: u64) -> Res {
    for i in 0..len / MIB {
        client.write(i * MIB, &vec![0xdd; MIB as usize], 0)?.ok("write")?;
    }
    client.flush()?.ok("FLUSH")
}

/// tmpfs punches holes, but zeroes no range in place. FAST_ZERO with NO_HOLE, which only slow writing could do, is refused
/// and changes no byte; without FAST_ZERO the zeros are written, and allocated.
fn slow_zero(lab: &Lab, backend: Backend) -> Res {
    let shm = tempfile::Builder::new().prefix("nbd.").tempdir_in(need::SHM)?;
    let image = shm.path().join("a.img");
    image::sparse(&image, 16 * MIB)?;
    let server = Launch::new(lab, backend).image(&image).start()?;
    let mut client = server.client()?;
    fill(&mut client, 4 * MIB)?;
    let before = fs::read(&image)?;
    for (offset, len) in [(0, 4096), (MIB, 2 * MIB), (0, 16 * MIB)] {
        let flags = flag::FAST_ZERO | flag::NO_HOLE;
        let answer = client.plain(cmd::WRITE_ZEROES, flags, offset, len)?;
        answer.is(err::ENOTSUP, "FAST_ZERO with NO_HOLE on tmpfs")?;
    }
    check!(fs::read(&image)? == before, "a refused FAST_ZERO changed the image");
    client.plain(cmd::WRITE_ZEROES, flag::NO_HOLE, MIB, 10 * MIB)?.ok("zeroes, NO_HOLE")?;
    let bytes = fs::read(&image)?;
    let zeroed = &bytes[MIB as usize..11 * MIB as usize];
    check!(zeroed.iter().all(|&b| b == 0), "not all zero");
    check!(bytes[..MIB as usize].iter().all(|&b| b == 0xdd), "zeroed too much");
    check!(image::allocated(&image)? >= 11 * MIB, "NO_HOLE left a hole");
    client.disconnect()?;
    server.stop()
}
