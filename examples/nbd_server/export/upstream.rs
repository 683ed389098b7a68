//! Exports of other NBD servers, served as exports of this one.

use std::sync::Arc;
use std::time::Duration;

use bufcache::BlockDevice;
use nbd_protocol::{ExportInfo, MAX_PAYLOAD, TransmissionFlags as Flags};
use tracing::info;

use super::{Export, ExportError, ExportTable};
use crate::blocks::{BLOCK, Backing, Source};
use crate::open_files::FileState;
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
        let mut known = self.known.lock();
        let file = self.blocks.attach(Backing::upstream(device)).map_err(ExportError::Cache)?;
        known.files.insert((u64::MAX, u64::MAX, file as u64), file); // which is no file's identity
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
