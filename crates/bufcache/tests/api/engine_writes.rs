//! Write-back of a device that uses engines, by threads that block.

use std::fs::OpenOptions;

use crate::world::*;

/// Scattered blocks of a file, buffered and direct, by system calls, also beside a lent engine.
#[test]
fn many_scattered_blocks_are_written() {
    for flags in [0, libc::O_DIRECT] {
        check(flags);
    }
}

fn check(flags: i32) {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // With O_DIRECT the last block of the device is whole.
    let len = if flags == 0 { 4096 * 1000 + 100 } else { 4096 * 1001 };
    file.as_file().set_len(len).unwrap();
    let cache = Cache::new(4096 * 600).unwrap();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(file.path());
    let device = match opened {
        Ok(file) => bufcache::FileDevice::new(file).unwrap(),
        Err(_) => return println!("no O_DIRECT here: the engine's writes are not tested"),
    };
    let device = cache.attach(device).unwrap();
    let engine = std::rc::Rc::new(aio_reap::Engine::new().unwrap());
    for round in 1..4_u8 {
        let _lent = (round == 2).then(|| bufcache::lend_engine(&engine));
        let blocks = (0..500_u64).map(|at| if at == 0 { 1000 } else { at * 2 - at % 3 / 2 });
        let blocks: std::collections::BTreeSet<_> = blocks.collect();
        for &block in &blocks {
            device.create(block).unwrap().fill(round);
        }
        device.sync().unwrap();
        assert_eq!(engine.stats().accepted, 0, "a thread that blocks submits nothing");
        for block in blocks {
            let mut there = [0; 100];
            file.as_file().read_exact_at(&mut there, block * 4096).unwrap();
            assert_eq!(there, [round; 100], "{block}");
        }
    }
    assert_eq!(cache.stats().dirty, 0);
    assert_eq!(file.as_file().metadata().unwrap().len(), len);

    // The engine does not keep the file of a device open: it could not be unmounted.
    let _lent = bufcache::lend_engine(&engine);
    device.readahead(4..6);
    engine.drain().unwrap();
    assert_eq!(device.get(4).unwrap()[0], 0);
    drop(device);
    let path = file.path().canonicalize().unwrap();
    let descriptors = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        all.filter(|fd| fd.path().read_link().is_ok_and(|of| of == path)).count()
    };
    testkit::wait_until(|| descriptors() == 1);
}
