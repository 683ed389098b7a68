//! The three behaviours of a read at the end of the file.

use std::io;

use aio_reap::Request;

/// Sets the behaviour with this number.
pub(crate) fn with_end<B: 'static>(request: Request<'_, B>, at_end: u8) -> Request<'_, B> {
    match at_end {
        0 => request,
        1 => request.zero_fill(),
        _ => request.exact(),
    }
}

/// Checks the result of such a read of `bytes`, whose buffer was full of 0xee, if the file has
/// `there`.
pub(crate) fn check(
    at_end: u8,
    read: Result<usize, aio_reap::RequestError>,
    bytes: &[u8],
    there: &[u8],
) {
    match at_end {
        0 => assert_eq!(read.unwrap(), there.len()),
        1 => assert_eq!(read.unwrap(), bytes.len()),
        _ if there.len() == bytes.len() => assert_eq!(read.unwrap(), bytes.len()),
        _ => assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
    }
    assert_eq!(&bytes[..there.len()], there);
    let rest = if at_end == 1 { 0 } else { 0xee };
    assert!(bytes[there.len()..].iter().all(|&byte| byte == rest));
}
