//! The calls of the tables of waits and of failures, as a thread and as a task make them.

use std::ops::Range;

use crate::world::*;

/// A call that has to do with block 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Call {
    Get,
    GetMut,
    Create,
    Invalidate,
    Flush,
    Sync,
    WriteThrough,
    Discard,
    Zero,
    WriteAround,
    Reset,
    Close,
}

pub(crate) use Call::*;

/// The block of a get, and the blocks of a call that changes the device.
pub(crate) type At = (u64, Range<u64>);

/// The first byte of the block, if the call is a get.
pub(crate) type Done = Result<Option<u8>, WriteError>;

fn by_thread(disk: &Device, call: Call, (block, wiped): At) -> Done {
    match call {
        Get => return Ok(Some(disk.get(block)?[0])),
        GetMut => drop(disk.get_mut(1)?),
        Create => drop(disk.create(1)?),
        Invalidate => _ = disk.invalidate(1)?,
        Flush => disk.flush()?,
        Sync => disk.sync()?,
        WriteThrough => disk.write_through(1..2)?,
        Discard => disk.discard(wiped)?,
        Zero => disk.zero(wiped)?,
        WriteAround => disk.write_around(wiped.start, &vec![3; wiped.count() * SIZE])?,
        Reset => _ = disk.reset()?,
        Close => disk.close()?,
    }
    Ok(None)
}

pub(crate) async fn by_task(disk: &Device, call: Call, (block, wiped): At) -> Done {
    match call {
        Get => return Ok(Some(disk.get_async(block).await?[0])),
        GetMut => drop(disk.get_mut_async(1).await?),
        Create => drop(disk.create_async(1).await?),
        Flush => disk.flush_async().await?,
        Sync => disk.sync_async().await?,
        WriteThrough => disk.write_through_async(1..2).await?,
        Discard => disk.discard_async(wiped).await?,
        Zero => disk.zero_async(wiped).await?,
        Close => disk.close_async().await?,
        Invalidate | WriteAround | Reset => {
            let at = (block, wiped);
            return disk.call_async(move |disk| by_thread(disk, call, at)).await;
        }
    }
    Ok(None)
}

pub(crate) fn make(disk: &Device, call: Call, at: At, of_task: bool) -> Done {
    if of_task { block_on(by_task(disk, call, at)) } else { by_thread(disk, call, at) }
}
