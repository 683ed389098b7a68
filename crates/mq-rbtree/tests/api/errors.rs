//! Errors: each has its own text, maps to an errno of POSIX, and returns what was refused.
#![cfg(not(offlock_model))]

use std::collections::BTreeSet;
use std::error::Error;
use std::io;

use mq_rbtree::{BuildError, Queue, ReceiveError, SendError, SendRefused};

#[test]
fn each_reason_has_an_errno_and_a_text() {
    let send = [
        (SendRefused::Full, libc::EAGAIN),
        (SendRefused::Timeout, libc::ETIMEDOUT),
        (SendRefused::Closed, libc::ESHUTDOWN),
        (SendRefused::BadPriority { priority: 40_000 }, libc::EINVAL),
        (SendRefused::NoMemory, libc::ENOMEM),
    ];
    for (reason, errno) in send {
        assert_eq!(reason.errno(), errno);
        assert_eq!(io::Error::from(reason).raw_os_error(), Some(errno));
        let error = SendError { value: Unprintable, reason };
        assert_eq!(error.to_string(), reason.to_string());
        assert_eq!(format!("{error:?}"), format!("SendError {{ reason: {reason:?}, .. }}"));
        assert_eq!(io::Error::from(error).raw_os_error(), Some(errno));
    }
    let receive = [
        (ReceiveError::Empty, libc::EAGAIN),
        (ReceiveError::Timeout, libc::ETIMEDOUT),
        (ReceiveError::Closed, libc::ESHUTDOWN),
    ];
    for (error, errno) in receive {
        assert_eq!((error.errno(), io::Error::from(error).raw_os_error()), (errno, Some(errno)));
    }
    let build = [
        (BuildError::Limits { messages: 5, reserved: 7 }, libc::EINVAL),
        (BuildError::BadPriority { priority: 40_000 }, libc::EINVAL),
        (BuildError::NoMemory, libc::ENOMEM),
    ];
    for (error, errno) in build {
        assert_eq!((error.errno(), io::Error::from(error).raw_os_error()), (errno, Some(errno)));
    }
    for (text, numbers) in [
        (send[3].0.to_string(), &["40000", "32767"][..]),
        (build[0].0.to_string(), &["7 of 5"]),
        (build[1].0.to_string(), &["40000", "32767"]),
        (BuildError::Limits { messages: 0, reserved: 0 }.to_string(), &["0 messages"]),
        (
            BuildError::Limits { messages: 1 << 32, reserved: 0 }.to_string(),
            &["4294967296", "4294967232"],
        ),
    ] {
        assert!(numbers.iter().all(|number| text.contains(number)), "{text}");
    }
    let (of_send, of_receive) = (send.map(|e| e.0.to_string()), receive.map(|e| e.0.to_string()));
    let all: BTreeSet<_> = of_send.iter().chain(&of_receive).collect();
    assert_eq!(all.len(), 8, "all differ");
    assert!(all.iter().all(|text| !text.is_empty() && !text.ends_with('.')));
}

struct Unprintable;

/// An error converts to a boxed one by the question mark and still carries the message.
#[test]
fn errors_are_send_and_return_the_message() {
    fn fails() -> Result<(), Box<dyn Error + Send + Sync>> {
        let queue: Queue<Vec<u8>> = Queue::new(1)?;
        queue.try_send(vec![1], 1)?;
        assert_eq!(queue.try_send(vec![2], 2).unwrap_err().into_inner(), [2]);
        queue.try_send(vec![3], 3)?;
        Ok(())
    }
    let error = fails().unwrap_err();
    assert!(error.is::<SendError<Vec<u8>>>());
    let error = Queue::<u8>::new(0).map(drop).unwrap_err();
    assert_eq!(error, BuildError::Limits { messages: 0, reserved: 0 });
}
