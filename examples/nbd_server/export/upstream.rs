//! Exports of other NBD servers, served as exports of this one.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bufcache::BlockDevice;
use nbd_protocol::{ExportInfo, MAX_PAYLOAD, TransmissionFlags as Flags};
use rustix::fs::{MemfdFlags, memfd_create};
use tracing::info;

use super::{Export, ExportError, ExportTable};
use crate::blocks::{BLOCK, Backing, Source};
use crate::open_files::{FileState, Identity, identity};
use crate::upstream::{Address, NbdDevice, UpstreamOptions, UpstreamStats};

impl ExportTable {
    /// Connects to an upstream export, and adds it.
    pub(super) fn add_upstream(
        &self,
        name: String,
        address: &Address,
        read_only: bool,
    ) -> Result<(), ExportError> {
        let fail =
            |error| ExportError::Upstream { address: address.to_string(), error: Box::new(error) };
        let reconnect = Duration::from_secs(self.args.reconnect);
        let options = UpstreamOptions { reconnect, ..UpstreamOptions::default() };
        let device = Arc::new(NbdDevice::open(address.clone(), options).map_err(fail)?);
        let min = device.alignment();
        if min > BLOCK {
            return Err(ExportError::UpstreamBlocks { address: address.to_string(), min });
        }
        let read_only = read_only || self.args.read_only || device.is_read_only();
        let common = Flags::HAS_FLAGS
            | Flags::SEND_FLUSH
            | Flags::SEND_FUA
            | Flags::SEND_CACHE
            | Flags::SEND_DF
            | Flags::CAN_MULTI_CONN;
        let flags = common
            | match read_only {
                true => Flags::READ_ONLY,
                false => Flags::SEND_TRIM | Flags::SEND_WRITE_ZEROES,
            };
        let info = ExportInfo {
            name: name.clone(),
            description: address.to_string(),
            size: device.len(),
            flags,
            // With a cache, parts of the upstream's blocks are put together there.
            min_block: if self.args.cache == 0 { min as u32 } else { 1 },
            preferred_block: BLOCK as u32,
            max_block: MAX_PAYLOAD,
        };
        info!(export = info.name, size = info.size, upstream = %address, "serving");
        let stand_in = stand_in(info.size).map_err(ExportError::Cache)?;
        let identity: Identity = identity(&stand_in.metadata().map_err(ExportError::Cache)?);
        let mut known = self.known.lock();
        self.blocks.attach(Backing::upstream(device)).map_err(ExportError::Cache)?;
        let file = self.files.push(stand_in);
        known.files.insert(identity, file);
        known.states.push(FileState::new(info.size));
        let index = self.exports.push(Export { info, file, start: 0, grows: false });
        known.names.insert(name, index);
        Ok(())
    }
}

impl ExportTable {
    /// The figures of the upstream exports, by name.
    pub(crate) fn upstreams(&self) -> Vec<(String, UpstreamStats)> {
        let stats = |(_, export): (usize, &Export)| {
            let Source::Upstream(upstream) = &self.image(export.file).source else { return None };
            Some((export.info.name.clone(), upstream.stats()))
        };
        self.exports.iter().filter_map(stats).collect()
    }
}

/// An empty file that stands in for the file of an image. No bytes are written to it.
fn stand_in(len: u64) -> io::Result<File> {
    let file = File::from(memfd_create("upstream", MemfdFlags::CLOEXEC)?);
    file.set_len(len)?;
    Ok(file)
}
