//! Requests that open, close and name files.

use std::cell::Cell;
use std::fs;
use std::future::Future;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::time::Instant;

use crate::common::{fifo, on_every_backend};
use crate::scripted::{full_at, scripted};
use aio_reap::{CompletionQueue, Engine, File, OpenOptions, SharedFile, SubmitError};
use aio_reap_test::sim::{Cancel, SubmitStep, Transfer};
use tempfile::TempPath;

const READ: OpenOptions = OpenOptions::read_only();

/// Returns how many descriptors of this process are open on the file. Other tests run beside.
fn descriptors_of(path: &Path) -> usize {
    let open = fs::read_dir("/proc/self/fd").unwrap();
    let open = open.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    open.filter(|target| target == path).count()
}

/// Makes an empty file that is not open.
fn temp_path() -> TempPath {
    tempfile::NamedTempFile::new().unwrap().into_temp_path()
}

fn errno<T>(result: Result<T, aio_reap::RequestError>) -> i32 {
    result.err().expect("it fails").errno()
}

#[test]
fn files_are_opened_read_and_written() {
    on_every_backend(|engine| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let new = OpenOptions::read_write().create_new(0o640);
        let (file, name) = engine.open(&path, new).submit().unwrap().wait();
        let file = file.unwrap();
        assert_eq!(errno(engine.open(name, new).submit().unwrap().wait().0), libc::EEXIST);
        engine.write(&file, b"hello", 3).submit().unwrap().wait().0.unwrap();
        let (read, buf) = engine.read(&file, vec![9; 8], 0).submit().unwrap().wait();
        assert_eq!((read.unwrap(), &buf[..]), (8, &b"\0\0\0hello"[..]));

        let (flags, std) =
            (OpenOptions::write_only().flags(libc::O_TRUNC), fs::metadata(&path).unwrap());
        assert_eq!((std.size(), std.mode() & 0o777 & !0o040), (8, 0o600));
        engine.open(&path, flags).submit().unwrap().wait().0.unwrap();
        assert_eq!(fs::metadata(&path).unwrap().size(), 0);
        let log = engine
            .open(&path, OpenOptions::write_only().flags(libc::O_APPEND))
            .submit()
            .unwrap()
            .wait();
        let log = log.0.unwrap();
        for _ in 0..2 {
            engine.write(&log, b"ab", 0).submit().unwrap().wait().0.unwrap();
        }
        assert_eq!(fs::read(&path).unwrap(), b"abab");

        fs::remove_file(&path).unwrap();
        assert_eq!(errno(engine.open(&path, READ).submit().unwrap().wait().0), libc::ENOENT);
    });
}

#[test]
fn metadata_is_that_of_the_standard_library() {
    on_every_backend(|engine| {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&path, vec![1; 5000]).unwrap();
        symlink(&path, &link).unwrap();
        for path in [&*path, folder.path(), Path::new("/dev/null")] {
            let (stat, _) = engine.stat(path).submit().unwrap().wait();
            let (stat, std) = (stat.unwrap(), fs::metadata(path).unwrap());
            assert_eq!((stat.size, stat.blocks, stat.mode), (std.size(), std.blocks(), std.mode()));
            assert_eq!((stat.is_file(), stat.is_dir()), (std.is_file(), std.is_dir()));
        }
        let (stat, std) =
            (engine.stat(&link).submit().unwrap().wait(), fs::metadata(&path).unwrap());
        assert_eq!(stat.0.unwrap().mode & 0o7777, std.mode() & 0o7777, "of the file that it names");
        // Of an open file, whose name is gone, and of an open directory.
        let file = engine.open(&path, READ).submit().unwrap().wait().0.unwrap();
        let dir = engine.open(folder.path(), READ).submit().unwrap().wait().0.unwrap();
        fs::remove_file(&path).unwrap();
        let (stat, _) = engine.stat(&file).submit().unwrap().wait();
        assert_eq!(stat.unwrap().size, 5000);
        assert!(engine.stat(&dir).submit().unwrap().wait().0.unwrap().is_dir());
        assert_eq!(errno(engine.open(&link, READ).submit().unwrap().wait().0), libc::ENOENT);
        fs::write(&path, "x").unwrap();
        let refused = engine.open(&link, READ.flags(libc::O_NOFOLLOW)).submit().unwrap().wait().0;
        assert_eq!(errno(refused), libc::ELOOP);
    });
}

#[test]
fn inv19_an_opened_file_without_a_receiver_is_closed() {
    on_every_backend(|engine| {
        let path = temp_path();
        // Dropped while it is pending, in flight or done.
        let plug = engine.plug();
        drop(engine.open(&path, READ).submit().unwrap());
        drop(plug);
        drop(engine.open(&path, READ).submit().unwrap());
        let done = engine.open(&path, READ).submit().unwrap();
        engine.drain().unwrap();
        assert!(done.is_done());
        assert_eq!(descriptors_of(&path), 1);
        drop(done);
        // A callback and a queue that drop the result.
        engine.open(&path, READ).callback(|_, _| ()).unwrap();
        let queue = CompletionQueue::new();
        engine.open(&path, READ).enqueue(&queue, 1).unwrap();
        engine.drain().unwrap();
        assert_eq!((queue.len(), descriptors_of(&path)), (1, 1));
        let kept: File = queue.pop().unwrap().result.unwrap();
        assert!(kept.alignment().is_none());
        engine.open(&path, READ).enqueue(&queue, 2).unwrap();
        engine.drain().unwrap();
        drop((queue, kept));
        assert_eq!(descriptors_of(&path), 0);
    });
}

#[test]
fn inv19_a_panic_closes_opened_files_and_closes_no_descriptor_twice() {
    on_every_backend(|engine| {
        let kind = engine.backend();
        let path = temp_path();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let builder = Engine::builder().reap_mode(aio_reap::ReapMode::OnTurn);
            let engine = builder.backend(kind).build().unwrap();
            let called = Rc::new(Cell::new(false));
            let flag = Rc::clone(&called);
            engine.open(&path, READ).callback(move |_, _| flag.set(true)).unwrap();
            engine
                .close(fs::File::open(&path).unwrap())
                .callback(|_, _| panic!("not run"))
                .unwrap();
            std::mem::forget(engine.plug());
            engine
                .close(fs::File::open(&path).unwrap())
                .callback(|_, _| panic!("not run"))
                .unwrap();
            drop(called);
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(descriptors_of(&path), 0, "{kind}");
    });
    // Ready and in flight, on a device that tells which.
    for delivered in [false, true] {
        let path = temp_path();
        let other = fs::File::open("/dev/null").unwrap();
        let mut number = 0;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let (engine, script) = scripted(128);
            let closing = at_a_high_number(&fs::File::open(&path).unwrap());
            number = closing.as_raw_fd();
            engine.close(closing).callback(|_, _| panic!("not run")).unwrap();
            engine.open(&path, READ).callback(|_, _| panic!("not run")).unwrap();
            script.complete(2);
            assert_eq!(descriptors_of(&path), 1);
            // SAFETY: the script has closed the descriptor, and no other thread uses such a number.
            assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
            if delivered {
                engine.nop().callback(|_, ()| panic!("on purpose")).unwrap();
            }
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(descriptors_of(&path), 0);
        // SAFETY: `dup2` made the descriptor above.
        let again = unsafe { OwnedFd::from_raw_fd(number) };
        let target = fs::read_link(format!("/proc/self/fd/{number}")).expect("it is still open");
        assert_eq!(target, Path::new("/dev/null"));
        drop(again);
    }
}

/// A waker that panics.
struct Panicking;

impl Wake for Panicking {
    fn wake(self: Arc<Self>) {
        panic!("on purpose");
    }
}

/// The outcome of an open is taken, which frees a slot, and the wake-up of the future that waits for it
/// panics. The future is woken by the next turn in any case.
#[test]
fn inv19_a_panic_of_a_wake_up_closes_the_opened_file() {
    for dropped in [false, true] {
        let (engine, script) = full_at(1);
        let path = temp_path();
        let open = engine.open(&path, READ).submit().unwrap();
        let mut waits = [pin!(engine.nop().submit_async()), pin!(engine.nop().submit_async())];
        let waker = Waker::from(Arc::new(Panicking));
        let (first, second) = waits.split_at_mut(1);
        assert!(first[0].as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert!(second[0].as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        script.complete(1);
        engine.turn();
        assert!(open.is_done());
        assert_eq!(descriptors_of(&path), 1);
        let panicked = catch_unwind(AssertUnwindSafe(|| match dropped {
            true => drop(open),
            false => drop(open.wait()),
        }));
        assert!(panicked.is_err());
        assert_eq!(descriptors_of(&path), 0, "the opened file has no owner, dropped: {dropped}");
        assert!(first[0].as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }
}

/// An open that was cancelled may have been performed all the same.
#[test]
fn inv19_a_cancelled_open_without_a_receiver_is_closed() {
    let (engine, script) = scripted(128);
    let path = temp_path();
    for cancel in [Cancel::Works, Cancel::TooLate, Cancel::Refused] {
        script.cancels(cancel);
        let open = engine.open(&path, READ).submit().unwrap();
        assert_eq!(open.cancel(), cancel != Cancel::Refused);
        drop(open);
        let late = engine.open(&path, READ).cancel_at(Instant::now()).submit().unwrap();
        engine.turn();
        script.complete(2);
        engine.drain().unwrap();
        assert_eq!(descriptors_of(&path), usize::from(cancel != Cancel::Works), "{cancel:?}");
        drop(late.wait());
        assert_eq!(descriptors_of(&path), 0, "{cancel:?}");
    }
    // The open of a FIFO waits for its other end, where it is performed by a thread.
    on_every_backend(|engine| {
        let (_folder, path) = fifo();
        let open = engine.open(&path, READ).submit().unwrap();
        open.cancel();
        drop(open);
        // Opened for both, the FIFO has its other end also if the thread comes to its open later.
        let other_end = fs::File::options().read(true).write(true).open(&path).unwrap();
        engine.drain().unwrap();
        drop(other_end);
        assert_eq!(descriptors_of(&path), 0);
    });
}

/// Duplicates a descriptor to a number that no other test uses.
fn at_a_high_number(fd: &impl AsFd) -> OwnedFd {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the call takes no pointer.
    let number = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 700) };
    assert!(number >= 700);
    // SAFETY: the kernel has just returned this descriptor.
    unsafe { OwnedFd::from_raw_fd(number) }
}

#[test]
fn inv19_a_close_closes_once_whatever_its_result_is() {
    on_every_backend(|engine| {
        let path = temp_path();
        let file = engine.open(&path, READ).submit().unwrap().wait().0.unwrap();
        let clone = file.clone();
        let file = file.into_fd().unwrap_err();
        drop(clone);
        let plug = engine.plug();
        let close = engine.close(file.into_fd().unwrap()).submit().unwrap();
        assert!(!close.cancel());
        let nop = engine.nop().submit().unwrap();
        assert!(nop.cancel());
        drop(plug);
        let (closed, fd) = close.wait();
        closed.unwrap();
        assert!(fd.is_none());
        assert_eq!(errno(nop.wait().0), libc::ECANCELED);
        assert_eq!(descriptors_of(&path), 0);
        // In time, while no thread waits.
        let late = engine.close(fs::File::open(&path).unwrap());
        drop(late.cancel_at(Instant::now()).submit().unwrap());
        engine.drain().unwrap();
        assert_eq!(descriptors_of(&path), 0);
    });
    // The kernel's errors, which are never followed by another attempt.
    let (engine, script) = scripted(128);
    for error in [libc::EINTR, libc::EINPROGRESS, libc::EAGAIN, libc::EIO] {
        script.on_transfer(Transfer::Fail(error));
        let path = temp_path();
        let close = engine.close(fs::File::open(&path).unwrap());
        let (closed, fd) = close.submit().unwrap().wait();
        match error {
            libc::EINTR | libc::EINPROGRESS => closed.unwrap(),
            _ => assert_eq!(errno(closed), error),
        }
        assert!(fd.is_none());
        assert_eq!(descriptors_of(&path), 0, "the device has closed it");
    }
    // A submission that the kernel refuses.
    script.on_submit(SubmitStep::Refuse(0, libc::EIO));
    let path = temp_path();
    let (closed, fd) = engine.close(fs::File::open(&path).unwrap()).submit().unwrap().wait();
    assert_eq!((errno(closed), script.log().len()), (libc::EIO, 4));
    assert!(fd.is_none());
    assert_eq!(descriptors_of(&path), 0, "the engine has closed it");
    assert_eq!(engine.stats().retries, 0);
}

#[test]
fn refused_requests_return_paths_and_descriptors() {
    let (engine, _script) = full_at(1);
    let refused = engine.open("a\0b", READ).submit().unwrap_err();
    assert!(matches!(&refused, SubmitError::InvalidPath(_)), "{refused:?}");
    assert_eq!(
        (refused.errno(), refused.to_string()),
        (libc::EINVAL, "the path has a zero byte".into())
    );
    let nop = engine.nop().submit().unwrap();
    let path = temp_path();
    let refused = engine.close(fs::File::open(&path).unwrap()).submit().unwrap_err();
    assert!(matches!(&refused, SubmitError::Full(_)));
    assert!(refused.into_request().into_buf().is_some());
    let refused = engine.stat(String::from("/long enough")).submit().unwrap_err();
    assert!(format!("{:?}", refused.into_request().into_buf()).contains("/long enough"));
    drop(nop);
}

/// An orphaned `stat` writes to memory that is still there.
#[test]
fn inv13_paths_and_results_stay_until_the_completion() {
    let (engine, script) = scripted(128);
    let path = temp_path();
    drop(engine.stat(&path).submit().unwrap());
    drop(engine.open(&path, READ).submit().unwrap());
    let _other = vec![0x55_u64; 64]; // would get the memory
    assert_eq!(script.complete(2), 2);
    engine.drain().unwrap();
    assert_eq!(descriptors_of(&path), 0);
}

#[test]
fn inv19_shared_descriptors_stay_with_their_owners() {
    on_every_backend(|engine| {
        let path = temp_path();
        let owner = fs::File::options().read(true).write(true).open(&path).unwrap();
        let shared = SharedFile::new(owner).unwrap();
        let attached = engine.attach_shared(&shared);
        assert_eq!(attached.as_fd().as_raw_fd(), shared.as_fd().as_raw_fd());
        engine.write(&attached, b"abc", 0).submit().unwrap().wait().0.unwrap();
        drop(attached.into_fd().unwrap_err());
        assert_eq!(descriptors_of(&path), 1);
        let attached = engine.attach_shared(&shared);
        drop(shared);
        assert_eq!(descriptors_of(&path), 1);
        drop(attached.into_fd().unwrap()); // the last handle
        assert_eq!(descriptors_of(&path), 0);
    });
}
