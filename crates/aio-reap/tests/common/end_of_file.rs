//! The two behaviours of a read at the end of the file.

use aio_reap::Request;

/// Chooses whether the read fills its buffer with zeros.
pub(crate) fn with_end<B: 'static>(request: Request<'_, B>, zero_fill: bool) -> Request<'_, B> {
    if zero_fill { request.zero_fill() } else { request }
}

/// Checks the result of such a read of `bytes`, whose buffer was full of 0xee, if the file has
/// `there`.
pub(crate) fn check(
    zero_fill: bool,
    read: Result<usize, aio_reap::RequestError>,
    bytes: &[u8],
    there: &[u8],
) {
    assert_eq!(read.unwrap(), if zero_fill { bytes.len() } else { there.len() });
    assert_eq!(&bytes[..there.len()], there);
    let rest = if zero_fill { 0 } else { 0xee };
    assert!(bytes[there.len()..].iter().all(|&byte| byte == rest));
}
