//! One file, one device: its blocks are never in the cache twice.

use std::fs::{OpenOptions, hard_link};
use std::io::Write;

use crate::world::*;

fn cache() -> Cache {
    Cache::builder(1 << 20).block_size(4096).build().unwrap()
}

fn file() -> (tempfile::TempDir, File) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    File::create(&path).unwrap().write_all(&[7; 1 << 16]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    (dir, file)
}

/// By another descriptor, another name, another kind of device.
#[test]
fn inv09_a_file_is_attached_once() {
    let (dir, file) = file();
    let cache = cache();
    let device = cache.attach(FileDevice::new(file).unwrap()).unwrap();
    device.get_mut(1).unwrap().fill(1);
    hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
    let open = |name| File::open(dir.path().join(name)).unwrap();
    for name in ["a", "b"] {
        let attached = [
            cache.attach(FileDevice::new(open(name)).unwrap()).err(),
            cache.attach(FaultDevice::new(FileDevice::new(open(name)).unwrap())).err(),
            cache.attach(Arc::new(FileDevice::new(open(name)).unwrap())).err(),
        ];
        for error in attached {
            assert!(matches!(error, Some(BuildError::Attached)));
        }
    }
    // Others are, and by other caches.
    std::fs::copy(dir.path().join("a"), dir.path().join("c")).unwrap();
    let other = cache.attach(FileDevice::new(open("c")).unwrap()).unwrap();
    assert_eq!(other.get(1).unwrap()[0], 7);
    drop(self::cache().attach(FileDevice::new(open("a")).unwrap()).unwrap());
}

/// The dirty blocks are on the file then.
#[test]
fn inv09_a_file_that_is_closed_or_let_go_is_attached_anew() {
    let (dir, file) = file();
    let cache = cache();
    let open = || {
        let open = OpenOptions::new().read(true).write(true).open(dir.path().join("a"));
        FileDevice::new(open.unwrap()).unwrap()
    };
    let mut device = cache.attach(FileDevice::new(file).unwrap()).unwrap();
    for round in 0..6_u8 {
        device.get_mut(1).unwrap().fill(round);
        let kept = (round % 3 == 2).then(|| device.clone());
        if round % 3 == 0 {
            drop(device)
        } else {
            device.close().unwrap()
        }
        device = cache.attach(open()).unwrap();
        assert_eq!(device.get(1).unwrap()[0], round);
        // A closed one that ends later is not this one's end.
        drop(kept);
        let again = cache.attach(open()).err();
        assert!(matches!(again, Some(BuildError::Attached)), "{again:?}");
    }
}

/// A close that fails keeps the file.
#[test]
fn inv09_a_file_that_could_not_be_closed_is_attached_still() {
    let (dir, file) = file();
    let cache = cache();
    let disk = Arc::new(FaultDevice::new(FileDevice::new(file).unwrap()));
    let options = AttachOptions::new().on_loss(|_| {});
    let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
    device.get_mut(1).unwrap().fill(1);
    disk.inject(Operation::Write, .., Fault::Error(libc::EIO));
    device.close().unwrap_err();
    let open = || FileDevice::new(File::open(dir.path().join("a")).unwrap()).unwrap();
    assert!(matches!(cache.attach(open()), Err(BuildError::Attached)));
    drop(device);
    cache.attach(open()).unwrap();
}

/// Its new blocks are read and written in place; a device that does not end with a whole block keeps its length.
#[test]
fn a_growing_device_has_the_blocks_that_its_file_has() {
    let (_dir, file) = file();
    let cache = cache();
    let options = || AttachOptions::new().growing();
    let attach = |file: File| cache.attach_with(FileDevice::new(file).unwrap(), options());
    let device = attach(file.try_clone().unwrap()).unwrap();
    assert!(device.get(16).is_err() && device.get(15).unwrap()[4095] == 7);
    file.set_len((1 << 16) + 8192).unwrap();
    assert_eq!(device.get(16).unwrap()[0], 0);
    device.create(17).unwrap().fill(9);
    device.sync().unwrap();
    assert_eq!(file.metadata().unwrap().len(), (1 << 16) + 8192);
    device.close().unwrap();
    file.set_len(5000).unwrap();
    let odd = attach(file.try_clone().unwrap()).unwrap();
    file.set_len(1 << 16).unwrap();
    assert!(odd.get(2).is_err());
    odd.get_mut(1).unwrap().fill(8);
    odd.sync().unwrap();
    let mut bytes = [1; 1000];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 4500).unwrap();
    assert_eq!((bytes[499], bytes[500]), (8, 0), "no byte behind its end is written");
}

/// The zero makes the file longer, as a write does, also by an engine; a discard does not.
#[test]
fn a_block_of_a_growing_device_that_was_zeroed_can_be_read() {
    let (_dir, file) = file();
    let cache = cache();
    let options = AttachOptions::new().growing();
    let device = cache.attach_with(FileDevice::new(file).unwrap(), options).unwrap();
    device.create(17).unwrap().fill(9);
    device.zero(17..18).unwrap();
    let lent = Rc::new(Engine::new().unwrap());
    let _lent = lend_engine(&lent);
    lent.block_on(device.zero_async(18..19)).unwrap().unwrap();
    device.zero(3..4).unwrap();
    device.sync().unwrap();
    for block in [3, 17, 18] {
        device.invalidate(block).unwrap();
        assert_eq!(device.get(block).map(|bytes| bytes[4095]), Ok(0), "{block}");
    }
    device.create(22).unwrap().fill(9);
    device.discard(22..23).unwrap();
    assert_eq!(device.get(22).err(), Some(GetError::ShortRead { block: 22 }));
}
