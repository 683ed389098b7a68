//! Exports of other NBD servers, served as exports of this one.

use std::sync::Arc;
use std::time::Duration;

use bufcache::BlockDevice;
use nbd_protocol::{ExportInfo, MAX_PAYLOAD, TransmissionFlags as Flags};

use super::{Export, ExportError, ExportTable, flags};
use crate::blocks::{BLOCK, Backing, Source};
use crate::image_spec::ImageSpec;
use crate::upstream::{Address, NbdDevice, UpstreamOptions, UpstreamStats};

impl ExportTable {
    /// Connects to an upstream export.
    pub(super) fn add_upstream(
        &self,
        spec: &ImageSpec,
        address: &Address,
    ) -> Result<Export, ExportError> {
        let fail =
            |error| ExportError::Upstream { address: address.to_string(), error: Box::new(error) };
        let reconnect = Duration::from_secs(self.args.reconnect);
        let options = UpstreamOptions { reconnect, ..UpstreamOptions::default() };
        let device = Arc::new(NbdDevice::open(address.clone(), options).map_err(fail)?);
        let min = device.alignment();
        if min > BLOCK {
            return Err(ExportError::UpstreamBlocks { address: address.to_string(), min });
        }
        let read_only = spec.read_only || self.args.read_only || device.is_read_only();
        let info = ExportInfo {
            name: spec.name.clone(),
            description: address.to_string(),
            size: device.len(),
            flags: flags(read_only, Flags::NONE),
            // With a cache, writes of less than an upstream's block are combined there.
            min_block: if self.args.cache == 0 { min as u32 } else { 1 },
            preferred_block: BLOCK as u32,
            max_block: MAX_PAYLOAD,
        };
        let image = self.blocks.attach(spec.name.clone(), Backing::upstream(device));
        Ok(Export { info, image: image.map_err(ExportError::Cache)?, start: 0, grows: false })
    }
}

impl ExportTable {
    /// Returns the statistics of the upstream exports, by name.
    pub(crate) fn upstreams(&self) -> Vec<(String, UpstreamStats)> {
        let stats = |export: &Export| {
            let Source::Upstream(upstream) = &export.image.source else { return None };
            Some((export.info.name.clone(), upstream.stats()))
        };
        self.fixed.iter().filter_map(stats).collect()
    }
}
