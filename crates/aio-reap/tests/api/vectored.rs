//! Vectored requests: whole, and across the end of the file.

use crate::common::on_every_backend;
use crate::direct_file::direct_file;
use crate::scripted::scripted;
use aio_reap::{AlignedBuf, BufList, SubmitError};

fn list(lens: &[usize], byte: impl Fn(usize) -> u8) -> BufList<Vec<u8>> {
    let mut at = 0;
    let bufs = lens.iter().map(|&len| {
        at += len;
        (at - len..at).map(&byte).collect()
    });
    BufList::new(bufs.collect()).unwrap()
}

#[test]
fn inv15_vectored_requests_do_the_same_everywhere() {
    on_every_backend(|engine| {
        let file = engine.attach(tempfile::tempfile().unwrap()).unwrap();
        let lens = [1, 4096, 0, 10_000, 7];
        let total: usize = lens.iter().sum();
        let bufs = list(&lens, |at| (at % 251) as u8);
        let (written, mut bufs) = engine.write_vectored(&file, bufs, 5).submit().unwrap().wait();
        assert_eq!(written.unwrap(), total);
        bufs.iter_mut().for_each(|buf| buf.fill(0xee));
        // The same list, across the end of the file.
        let (read, bufs) = engine.read_vectored(&file, bufs, 6).submit().unwrap().wait();
        assert_eq!(read.unwrap(), total - 1);
        let bytes = bufs.into_inner().concat();
        assert!((1..).zip(&bytes[..total - 1]).all(|(at, &byte)| byte == (at % 251) as u8));
        assert_eq!(bytes[total - 1], 0xee);

        let none = BufList::new(Vec::<Vec<u8>>::new()).unwrap();
        assert_eq!(engine.read_vectored(&file, none, 0).submit().unwrap().wait().0.unwrap(), 0);
        let most = list(&[3; 1024], |at| at as u8);
        let (written, most) = engine.write_vectored(&file, most, 0).submit().unwrap().wait();
        assert_eq!((written.unwrap(), most.len()), (3072, 1024));
        let past = engine.read_vectored(&file, most, 1 << 40).submit().unwrap().wait();
        assert_eq!(past.0.unwrap(), 0);
    });
}

/// On `O_DIRECT` files (Linux AIO's own vectored operations) every buffer must be aligned.
#[test]
fn direct_vectors_are_aligned_or_refused() {
    on_every_backend(|engine| {
        let Some((_keep, file)) = direct_file(engine) else { return };
        let blocks = |count: usize, byte: u8| {
            let bufs = (0..count).map(|nth| {
                let mut buf = AlignedBuf::zeroed(4096, 4096);
                buf.fill(byte + nth as u8);
                buf
            });
            BufList::new(bufs.collect()).unwrap()
        };
        let plug = engine.plug();
        let writes = [0u8, 4, 8]
            .map(|at| engine.write_vectored(&file, blocks(4, at), u64::from(at) * 4096).submit());
        drop(plug);
        for write in writes {
            assert_eq!(write.unwrap().wait().0.unwrap(), 4 * 4096);
        }
        let (read, bufs) = engine.read_vectored(&file, blocks(12, 99), 0).submit().unwrap().wait();
        assert_eq!(read.unwrap(), 12 * 4096);
        assert!((0..).zip(&*bufs).all(|(at, buf)| buf.iter().all(|&byte| byte == at)));

        let mut bufs = bufs;
        bufs[5].set_len(100);
        let refused = engine.write_vectored(&file, bufs, 0).submit();
        let Err(SubmitError::Misaligned(request)) = refused else { panic!("{refused:?}") };
        let mut bufs = request.into_buf();
        bufs[5].set_len(4096);
        assert!(matches!(
            engine.write_vectored(&file, bufs, 512 + 1).submit(),
            Err(SubmitError::Misaligned(_))
        ));
    });
}

/// A write that a device takes no bytes of fails with ENOSPC; an error of the device is returned as
/// it is.
#[test]
fn write_errors_are_typed() {
    let (engine, _script) = scripted(128);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let full = engine.attach(full).unwrap();
    let (written, buf) = engine.write(&full, vec![1; 10], 0).submit().unwrap().wait();
    assert_eq!(written.unwrap_err().errno(), libc::ENOSPC);
    assert_eq!(buf.len(), 10);
    on_every_backend(|engine| {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let full = engine.attach(full).unwrap();
        let bufs = list(&[5, 5], |_| 1);
        let (written, _) = engine.write_vectored(&full, bufs, 0).submit().unwrap().wait();
        assert_eq!(written.unwrap_err().errno(), libc::ENOSPC);
    });
}
