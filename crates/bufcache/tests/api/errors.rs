//! What each call returns where its operation of the device fails, and what is there then: for each kind of failure,
//! of a thread and of a task.

use crate::calls::*;
use crate::world::*;

/// The device does not have block 1 or has not made it durable, and block 5 is not cached.
const AT: At = (5, 1..2);

/// Each call, and an operation that it makes.
const CALLS: [(Call, Operation); 11] = [
    (Get, Operation::Read),
    (Flush, Operation::Write),
    (Sync, Operation::Write),
    (Sync, Operation::Sync),
    (WriteThrough, Operation::Write),
    (WriteThrough, Operation::Sync),
    (WriteAround, Operation::Write),
    (Discard, Operation::Discard),
    (Zero, Operation::Zero),
    (Close, Operation::Write),
    (Close, Operation::Sync),
];

fn make(device: &Device, call: Call, of_task: bool) -> Result<(), WriteError> {
    crate::calls::make(device, call, AT, of_task).map(drop)
}

/// How an operation fails: as a device fails it, or as one that begins its operations drops or panics at it.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Fault(Fault),
    Begun(Begun),
}

/// With the errno of a read, and of other operations; `io::Error::last_os_error()` has errno 0 behind a library that
/// has set none.
const FAILURES: [(Failure, i32); 10] = [
    (Failure::Fault(Fault::Error(libc::EIO)), libc::EIO),
    (Failure::Fault(Fault::Error(libc::ENOSPC)), libc::ENOSPC),
    (Failure::Fault(Fault::Error(0)), libc::EIO),
    (Failure::Fault(Fault::Error(-22)), libc::EIO),
    (Failure::Fault(Fault::Error(i32::MIN)), libc::EIO),
    (Failure::Fault(Fault::Panic), libc::EIO),
    (Failure::Fault(Fault::Short(100)), libc::ENOSPC),
    (Failure::Fault(Fault::Torn(0)), libc::EIO),
    (Failure::Begun(Begun::Dropped), libc::ECANCELED),
    (Failure::Begun(Begun::Panics), libc::EIO),
];

/// The error of a call whose operation fails.
fn error(call: Call, operation: Operation, failure: Failure, mut errno: i32) -> WriteError {
    use Failure::{Begun as Kept, Fault as Fails};
    let is_panic = matches!(failure, Fails(Fault::Panic) | Kept(Begun::Panics));
    if operation == Operation::Sync && matches!(failure, Fails(Fault::Short(_))) {
        errno = libc::EIO;
    }
    if operation == Operation::Sync || call == WriteThrough {
        return WriteError::Poisoned { errno };
    }
    match failure {
        _ if call == Get => WriteError::Get(match failure {
            _ if is_panic => GetError::Panicked { block: 5 },
            Fails(Fault::Short(_)) => GetError::ShortRead { block: 5 },
            Fails(Fault::Torn(_)) => GetError::Verify { block: 5 },
            _ => GetError::Io { errno, block: 5 },
        }),
        _ if is_panic => WriteError::Panicked { block: 1 },
        _ => WriteError::Io { errno, block: 1 },
    }
}

#[test]
fn inv12_a_read_that_fails_is_told_and_is_not_cached() {
    check_all(&CALLS[..1]);
}

#[test]
fn inv17_each_call_is_told_of_its_failure_and_loses_nothing() {
    check_all(&CALLS[1..]);
}

fn check_all(calls: &[(Call, Operation)]) {
    for &(call, operation) in calls {
        for (failure, errno) in FAILURES {
            // All operations fail, so these fail at the sync behind the write.
            let is_begun = matches!(failure, Failure::Begun(_));
            if is_begun && operation == Operation::Write && matches!(call, Sync | Close) {
                continue;
            }
            check(call, operation, failure, errno, false);
            check(call, operation, failure, errno, true);
        }
    }
}

fn check(call: Call, operation: Operation, failure: Failure, errno: i32, of_task: bool) {
    let what = format!("{call:?}, of a task: {of_task}, with {failure:?} of {operation:?}");
    let (cache, device, fails): (Cache, Device, Box<dyn Fn(bool)>) = match failure {
        Failure::Fault(fault) => {
            let verify = |_, bytes: &[u8]| bytes[0] != 0;
            let (cache, device, disk) = with(16, AttachOptions::new().verify(verify));
            let fails = move |fails| match fails {
                true => disk.inject(operation, .., fault),
                false => disk.heal(),
            };
            (cache, device, Box::new(fails))
        }
        Failure::Begun(begun) => {
            let (cache, device, disk) = kept(LONG);
            disk.does(Begun::Deferred);
            let fails = move |fails| disk.does(if fails { begun } else { Begun::Deferred });
            (cache, device, Box::new(fails))
        }
    };
    let other = device.clone();
    fill(&device, 1, 2);
    if operation == Operation::Sync {
        fill(&device, 2, 2);
        device.flush().unwrap();
    }
    fails(true);
    let error = error(call, operation, failure, errno);
    assert_eq!(make(&device, call, of_task), Err(error), "{what}");
    let dirty = usize::from(operation != Operation::Sync);
    assert_eq!((cache.stats().dirty / SIZE, device.get(1).unwrap()[0]), (dirty, 2), "{what}");
    assert!(!device.is_cached(5), "{what}");
    fails(false);
    if let WriteError::Poisoned { errno } = error {
        // Never "retried and fine". What is cached is served; what the device may have lost is not read from it.
        let calls = [make(&device, Sync, of_task), other.flush(), other.write_through(1..2)];
        assert_eq!(calls, [Err(error); 3], "{what}");
        assert_eq!(device.get_mut(3).err(), Some(GetError::Poisoned { errno }), "{what}");
        device.invalidate(2).unwrap();
        let lost: Vec<_> = (operation == Operation::Sync).then_some(2..3).into_iter().collect();
        let got = device.get(2).map(|block| block[0]);
        let expected = if lost.is_empty() { Ok(1) } else { Err(GetError::Poisoned { errno }) };
        assert_eq!(got, expected, "{what}");
        assert_eq!(device.reset().unwrap().blocks(), lost, "{what}");
        let _earlier = [device.sync(), other.sync()];
    } else {
        let is_told = operation == Operation::Write && call != WriteAround;
        let earlier = if is_told { Err(WriteError::Earlier { errno }) } else { Ok(()) };
        assert_eq!([other.sync(), other.sync()], [earlier, Ok(())], "{what}");
        assert_eq!(make(&device, Sync, of_task), Ok(()), "{what}");
    }
    assert_eq!(device.sync(), Ok(()), "{what}");
    // Nothing is marked, and the device has it.
    assert_eq!(device.get_mut(1).unwrap()[0], 2, "{what}");
    device.invalidate(1).unwrap();
    assert_eq!([1, 5].map(|block| device.get(block).unwrap()[0]), [2, 1], "{what}");
    device.close().unwrap();
}

/// A signal interrupts a sync. The cache makes it again: nothing is given up for it.
#[test]
fn inv18_an_interrupted_sync_is_made_again() {
    for (call, of_task) in
        [Sync, WriteThrough, Close].into_iter().flat_map(|call| [(call, false), (call, true)])
    {
        let (_cache, device, disk) = new();
        fill(&device, 1, 2);
        device.flush().unwrap();
        disk.inject(Operation::Sync, ..3, Fault::Error(libc::EINTR));
        assert_eq!(make(&device, call, of_task), Ok(()));
        assert_eq!((disk.count(Operation::Sync), disk.count(Operation::Write)), (4, 1));
    }
}

/// Also of a write to a device that is on another one.
#[test]
fn a_bypass_has_the_errno_of_its_write() {
    let (_cache, device, _disk) = new();
    let of_system = io::Error::from_raw_os_error;
    let errors: [(io::Error, i32); 5] = [
        (of_system(libc::ENOSPC), libc::ENOSPC),
        (of_system(0), libc::EIO),
        (of_system(i32::MIN), libc::EIO),
        (WriteError::Poisoned { errno: libc::EDQUOT }.into(), libc::EDQUOT),
        (GetError::Io { errno: libc::ENODATA, block: 1 }.into(), libc::ENODATA),
    ];
    for (error, errno) in errors {
        let bypass = device.try_bypass(5..6).unwrap().unwrap();
        assert_eq!(bypass.finish(Err(error)), Err(WriteError::Io { errno, block: 5 }));
    }
}

#[test]
fn an_error_of_a_limit_names_the_limit_and_the_value() {
    let texts = [
        (GetError::OutOfRange { block: 7, blocks: 5 }.to_string(), ["7", "5 blocks"]),
        (GetError::TooManyPins.to_string(), ["65535", "pins"]),
        (BuildError::BlockSize(1000).to_string(), ["1000", "65,536"]),
        (BuildError::Capacity(1000).to_string(), ["1000", "536870911"]),
        (BuildError::DeviceTooLarge(1 << 60).to_string(), ["1152921504606846976", "2^48"]),
        (BuildError::Misaligned { block_size: 512, alignment: 4096 }.to_string(), ["512", "4096"]),
    ];
    for (text, parts) in texts {
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}
