//! BLOCK_STATUS: finds the holes of an image.
//!
//! ```text
//!  BLOCK_STATUS ─► write dirty blocks back ─► ask the file system for holes ─► reply
//! ```
//!
//! The file system may have to read its map from the disk, or wait for a write to the file, so a
//! thread of the cache asks it. The file system does not know the dirty blocks, so they are written
//! back first. If that fails, everything is reported as data.
//!
//! A reply has at most [`ROOM`] bytes of extents, as the protocol allows: the client asks again
//! from where they end.

use std::fs::File;
use std::io;
use std::sync::Arc;

use aio_reap::AlignedBuf;
use nbd_protocol::wire::state;
use nbd_protocol::{Extent, Request};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use tracing::debug;

use crate::blocks::Source;
use crate::commands::Job;

/// The size of the buffer of a request: the smallest size of a buffer. Finding two extents takes
/// two system calls.
pub(crate) const ROOM: usize = 4096;

impl Job {
    /// Fills the buffer of a BLOCK_STATUS. Extents begin and end at multiples of the export's unit.
    pub(crate) async fn block_status(&self, one: bool, buf: &mut AlignedBuf) -> io::Result<()> {
        let Self { image, request: Request { offset, len, .. }, .. } = self;
        let (unit, style, offset, len) = (self.unit, self.style, *offset, *len);
        let end = offset + len; // `Request::check` has checked that it is within the export
        let most = if one { 1 } else { ROOM / Extent::size(style) };
        let found = match image.write_back(offset..end).await {
            Ok(()) => {
                let asked = Arc::clone(image);
                let part = move |at, end| match &asked.source {
                    Source::File(file) => part(file, at, end),
                    #[cfg(feature = "objects")]
                    Source::Volume(volume) => Ok(volume.part(at, end)),
                    #[cfg(test)]
                    Source::Device(_, file) => part(file, at, end),
                };
                let ask = move |_: &_| extents(part, (offset, end), unit, most);
                image.device.call_async(ask).await?
            }
            Err(error) => {
                debug!(%error, "the cache cannot be written back: holes are not told");
                vec![Extent { len, flags: 0 }]
            }
        };
        buf.set_len(found.len() * Extent::size(style));
        for (extent, bytes) in found.iter().zip(buf.chunks_exact_mut(Extent::size(style))) {
            if style.is_extended() {
                bytes.copy_from_slice(&extent.encode64());
            } else {
                // Not longer than the request, whose length has 32 bits.
                bytes.copy_from_slice(&extent.encode32().unwrap_or_default());
            }
        }
        Ok(())
    }
}

/// Returns at most `most` extents from `start` to `end`. Each begins and ends at a multiple of
/// `unit`, as `start` is, or at `end`. A unit that is only partly a hole is data. `part` returns
/// whether there is a hole at its first argument, and where the hole or data ends, at most at its second.
fn extents(
    part: impl Fn(u64, u64) -> io::Result<(bool, u64)>,
    (start, end): (u64, u64),
    unit: u64,
    most: usize,
) -> io::Result<Vec<Extent>> {
    let mut found: Vec<Extent> = Vec::new();
    let mut at = start;
    while at < end {
        let (mut hole, mut next) = part(at, end)?;
        if hole && next < end {
            next -= next % unit;
            if next <= at {
                (hole, next) = (false, end.min(at + unit));
            }
        } else if !hole {
            next = end.min(next.next_multiple_of(unit));
        }
        let flags = if hole { state::HOLE | state::ZERO } else { 0 };
        let len = next - at;
        let full = found.len() == most;
        match found.last_mut() {
            Some(last) if last.flags == flags => last.len += len,
            _ if full => break,
            _ => {
                found.try_reserve(1).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
                found.push(Extent { len, flags });
            }
        }
        at = next;
    }
    Ok(found)
}

/// Returns whether there is a hole at `at`, and the end of that hole or data, at most `end`. If the
/// file system does not know, there is data.
fn part(file: &File, at: u64, end: u64) -> io::Result<(bool, u64)> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) if data > at => Ok((true, data.min(end))),
        Ok(_) => match rustix::fs::seek(file, SeekFrom::Hole(at)) {
            Ok(hole) if hole > at => Ok((false, hole.min(end))),
            Ok(_) | Err(Errno::NXIO) => Ok((false, end)), // the file has changed in the meantime
            Err(error) => Err(error.into()),
        },
        // No data up to the end of the file, which should be after `end`. Reading past the end is
        // an error.
        Err(Errno::NXIO) => {
            let len = rustix::fs::seek(file, SeekFrom::End(0))?;
            Ok(if len > at { (true, len.min(end)) } else { (false, end) })
        }
        // A block device, or a file system without holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY) => Ok((false, end)),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const MOST: usize = 512;
    const HOLE: u64 = state::HOLE | state::ZERO;
    const MIB: u64 = 1 << 20;

    /// A file with turns of 64 KiB of zeros and of other bytes, which no file system merges. The
    /// first turn is a hole. `None` if the file system has no holes.
    fn striped(len: u64) -> Option<File> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for at in (0..len).step_by(128 << 10).map(|at| at + (64 << 10)) {
            file.write_all_at(&[1; 64 << 10], at).unwrap();
        }
        let hole = extents(|at, end| part(&file, at, end), (0, 4096), 1, 1).unwrap()
            == [Extent { len: 4096, flags: HOLE }];
        if !hole {
            println!("no holes here");
        }
        hole.then_some(file)
    }

    fn of(file: &File, start: u64, end: u64, unit: u64, most: usize) -> Vec<(u64, u64)> {
        let found = extents(|at, end| part(file, at, end), (start, end), unit, most).unwrap();
        found.iter().map(|extent| (extent.len, extent.flags)).collect()
    }

    #[test]
    fn holes_and_data_take_turns() {
        let Some(file) = striped(MIB) else { return };
        let turn = 64 << 10;
        let whole = of(&file, 0, MIB, 1, MOST);
        let wanted: Vec<_> = (0..16).map(|nr| (turn, if nr % 2 == 0 { HOLE } else { 0 })).collect();
        assert_eq!(whole, wanted);
        assert_eq!(of(&file, 0, MIB, 1, 3), wanted[..3]);
        assert_eq!(of(&file, 0, MIB, 1, 1), wanted[..1]);
        assert_eq!(of(&file, 1, turn + 1, 1, MOST), [(turn - 1, HOLE), (1, 0)]);
        let last = turn * 15;
        assert_eq!(of(&file, last - 4096, MIB, 1, MOST), [(4096, HOLE), (turn, 0)]);
    }

    #[test]
    fn a_unit_that_is_in_part_a_hole_is_data() {
        let Some(file) = striped(MIB) else { return };
        let unit = 96 << 10; // no power of two, so that turns and units differ
        let len = 10 * unit;
        // In KiB: 0..64 of the first unit are a hole, 64..96 are data. The next unit is data up to
        // 128, and so on.
        assert_eq!(of(&file, 0, len, unit, MOST), [(len, 0)]);
        assert_eq!(of(&file, 0, len, 32 << 10, 2), [(64 << 10, HOLE), (64 << 10, 0)]);
        // A hole that begins and ends within a unit, before a unit that is a hole.
        file.set_len(64 << 10).unwrap();
        file.set_len(MIB).unwrap();
        file.write_all_at(&[1], 200 << 10).unwrap();
        let found = of(&file, 0, MIB, 64 << 10, MOST);
        assert_eq!(found, [(192 << 10, HOLE), (64 << 10, 0), (768 << 10, HOLE)]);
    }

    #[test]
    fn the_end_of_a_file_that_shrank_is_no_hole() {
        let Some(file) = striped(MIB) else { return };
        file.set_len(200 << 10).unwrap(); // 128..192 are a hole, then data
        let found = of(&file, 128 << 10, MIB, 1, MOST);
        assert_eq!(found, [(64 << 10, HOLE), ((1024 - 192) << 10, 0)]);
        file.set_len(0).unwrap();
        assert_eq!(of(&file, 0, MIB, 1, MOST), [(1 << 20, 0)]);
        file.set_len(MIB / 2).unwrap();
        let found = of(&file, 0, MIB, 1, MOST);
        assert_eq!(found, [(1 << 19, HOLE), (1 << 19, 0)]);
        assert_eq!(of(&file, 0, MIB, MIB, MOST), [(1 << 20, 0)]);
    }

    #[test]
    fn a_device_without_seeks_is_data() {
        let zero = File::open("/dev/zero").unwrap(); // a device that does not seek
        assert_eq!(of(&zero, 0, 1 << 40, 1, MOST), [(1 << 40, 0)]);
    }
}
