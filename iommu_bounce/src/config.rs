// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Engine configuration and its rules.

use std::ops::RangeInclusive;
use std::time::Duration;

use thiserror::Error;

use crate::EndpointId;
use crate::backend::{ChunkStore, GuestRam, MapperLimits};
use crate::spec::{MAX_PROBE_SIZE, property};

/// Windows lie entirely below or entirely above 4 GiB, because some drivers support only windows below 4 GiB (docs/bounce-windows.md,
/// Discovery).
const FOUR_GIB: u64 = 1 << 32;

/// Minimum size of PROBE properties in bytes: room for the MSI window, and for the reserved ranges below and above the MSI window.
const MIN_PROBE_SIZE: usize = 3 * property::RESV_MEM_SIZE;

/// Configuration of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Page sizes: bit n stands for pages of 2^n bytes. The lowest set bit is the granule of mappings. The other bits are hints to the
    /// driver.
    pub page_size_mask: u64,
    /// IOVAs that a driver may map.
    pub input_range: RangeInclusive<u64>,
    /// Domain numbers that a driver may use.
    pub domain_range: RangeInclusive<u32>,
    /// Size of the properties in a PROBE reply in bytes: 72 to 512. With 0, the device does not offer PROBE.
    pub probe_size: u32,
    /// Addresses to which devices write message-signalled interrupts. The engine never maps these addresses.
    pub msi_window: RangeInclusive<u64>,
    /// True if unattached endpoints can access all RAM from power-on until the driver turns bypass off.
    pub bypass: bool,
    /// Limits on the host resources that a guest can use.
    pub limits: Limits,
    /// Bounce windows. With `None`, the device is a virtio-iommu without the extension.
    pub window: Option<WindowConfig>,
}

impl Default for EngineConfig {
    /// Returns a configuration with 4 KiB pages, 48-bit IOVAs, 65536 domain numbers, and the MSI window of x86. Bypass and bounce windows
    /// are off.
    fn default() -> Self {
        Self {
            page_size_mask: !0xfff,
            input_range: 0..=(1 << 48) - 1,
            domain_range: 0..=0xffff,
            probe_size: MAX_PROBE_SIZE,
            msi_window: 0xfee0_0000..=0xfeef_ffff,
            bypass: false,
            limits: Limits::default(),
            window: None,
        }
    }
}

/// Limits on the host resources that a guest can use. A request that exceeds a limit gets `NOMEM`.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of mappings over all domains.
    pub max_mappings: usize,
    /// Maximum number of domains at a time.
    pub max_domains: usize,
    /// Maximum number of page-table pages, of 4 KiB each, that the host builds for the mappings of one address space. This limit applies to
    /// address spaces with [page tables](crate::DmaMapper::keeps_page_tables). The host keeps the pages as long as the address space
    /// exists.
    pub max_table_pages: u64,
    /// Maximum bytes of mapped guest RAM over all address spaces of the host. Memory that is mapped twice counts twice. Chunks of windows
    /// do not count. A bypass domain counts, because it maps all RAM. Bypass of unattached endpoints also counts, unless
    /// [`EngineConfig::bypass`] turns bypass on at power-on. `u64::MAX` means no limit.
    /// [`set_max_mapped_bytes`](crate::Engine::set_max_mapped_bytes) changes the limit.
    pub max_mapped_bytes: u64,
    /// Maximum time to unmap everything, estimated from the typical duration of mapper calls. 4096 mappings are always allowed. If there
    /// are more mappings, a request that would exceed the time limit gets `NOMEM`. So unmapping delays a request, or a thread that waits
    /// for a request, by at most a few times this duration.
    pub max_unmap_time: Duration,
    /// Maximum bytes that one mapper call maps: a power of two, at least the granule. A longer mapping takes several calls, and the VMM can
    /// [interrupt](crate::Interrupt) the request between these calls.
    pub max_step: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_mappings: 1 << 18,
            max_domains: 1024,
            max_table_pages: 1 << 16,
            max_mapped_bytes: u64::MAX,
            max_unmap_time: Duration::from_secs(3),
            max_step: 1 << 30,
        }
    }
}

/// Configuration of bounce windows.
#[derive(Clone, Debug)]
pub struct WindowConfig {
    /// IOVAs of the windows, the same in every domain. The range must be aligned to chunks and must not overlap the MSI window. For
    /// drivers of version 2, an aperture above 4 GiB has a feature of its own:
    /// [`feature::BOUNCE_WINDOW_V2_HIGH`](crate::spec::feature::BOUNCE_WINDOW_V2_HIGH).
    pub aperture: RangeInclusive<u64>,
    /// Maximum bytes of window memory over all domains. It must not exceed the size of the region.
    pub budget: u64,
    /// Advice to the driver: maximum size in bytes of a DMA that the driver should copy. 0 leaves the decision to the driver.
    pub threshold: u32,
    /// The same advice for DMA that devices write. 0 stands for `threshold`.
    pub threshold_write: u32,
}

/// Error in an engine configuration.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// `page_size_mask` is zero.
    #[error("page_size_mask is 0: set at least one bit, such as bit 12 for pages of 4 KiB")]
    NoPageSize,
    /// A range ends before it starts.
    #[error("{0} is empty: its end must not be below its start")]
    EmptyRange(&'static str),
    /// `probe_size` is out of range or not a multiple of 8.
    #[error("probe_size is {0}: it must be 0 or a multiple of 8 from {MIN_PROBE_SIZE} to {MAX_PROBE_SIZE}")]
    ProbeSize(u32),
    /// A limit is zero.
    #[error("limits.{0} is 0: it must be at least 1")]
    ZeroLimit(&'static str),
    /// `max_step` is not a power of two, or is smaller than the granule.
    #[error("limits.max_step is {0:#x}: it must be a power of two and at least the granule, the smallest page size")]
    Step(u64),
    /// The window configuration is given without a chunk store, or a chunk store without a window configuration.
    #[error(
        "bounce windows need a window configuration and a chunk store, but only one of the two is given: give both or neither"
    )]
    WindowAndStore,
    /// The chunk size is not a power of two, or is smaller than the granule.
    #[error("the chunk size is {chunk:#x}: it must be a power of two and at least the granule of {granule:#x} bytes")]
    ChunkSize {
        /// Size of a chunk in bytes.
        chunk: u64,
        /// Size of the engine's smallest page in bytes.
        granule: u64,
    },
    /// The region does not consist of whole chunks, or has too many chunks.
    #[error("the shared region is {region:#x} bytes: it must be 1 to 2^32 whole chunks of {chunk:#x} bytes")]
    RegionSize {
        /// Size of the shared region in bytes.
        region: u64,
        /// Size of a chunk in bytes.
        chunk: u64,
    },
    /// The budget is larger than the region.
    #[error("the window budget is {budget:#x} bytes: it must be at most {region:#x}, the size of the shared region")]
    Budget {
        /// Budget in bytes.
        budget: u64,
        /// Size of the shared region in bytes.
        region: u64,
    },
    /// The aperture breaks a rule.
    #[error("the window aperture {start:#x} to {end:#x} {rule}")]
    Aperture {
        /// First IOVA.
        start: u64,
        /// Last IOVA.
        end: u64,
        /// Rule that the aperture breaks.
        rule: &'static str,
    },
    /// The engine has no bounce windows whose configuration could change.
    #[error("the engine has no bounce windows: create it with a window configuration")]
    NoWindows,
    /// An endpoint with this ID already exists.
    #[error("endpoint {0:#x} already exists: every endpoint needs its own ID")]
    EndpointExists(EndpointId),
    /// No endpoint has this ID.
    #[error("endpoint {0:#x} does not exist")]
    NoEndpoint(EndpointId),
    /// The host's smallest page is larger than the engine's smallest page.
    #[error(
        "endpoint {id:#x}: the host's smallest page has {host:#x} bytes, but page_size_mask allows pages of {granule:#x} bytes: clear the lower bits of page_size_mask"
    )]
    EndpointGranule {
        /// ID of the endpoint.
        id: EndpointId,
        /// Size of the host's smallest page in bytes, or 0 if the host supports no page size.
        host: u64,
        /// Size of the engine's smallest page in bytes.
        granule: u64,
    },
    /// The host can translate no IOVA of the input range.
    #[error("endpoint {0:#x}: the host cannot translate any IOVA of the engine's input_range")]
    EndpointRange(EndpointId),
    /// The endpoint is in bypass mode, but not all RAM can be mapped for it: the host refused, or the limit on mapped RAM is too low.
    #[error(
        "endpoint {0:#x}: bypass is on, but not all guest RAM can be mapped for the endpoint: raise the limits on locked memory (ulimit -l) and on mapped RAM (max_mapped), or turn bypass off"
    )]
    EndpointBypass(EndpointId),
    /// The host cannot translate the whole aperture.
    #[error(
        "endpoint {id:#x}: the host cannot translate the whole window aperture {start:#x} to {end:#x}: move the aperture to IOVAs that the host can translate"
    )]
    EndpointAperture {
        /// ID of the endpoint.
        id: EndpointId,
        /// First IOVA of the aperture.
        start: u64,
        /// Last IOVA of the aperture.
        end: u64,
    },
}

impl EngineConfig {
    /// Returns the size of the engine's smallest page in bytes.
    pub(crate) fn granule(&self) -> u64 {
        1u64.checked_shl(self.page_size_mask.trailing_zeros()).unwrap_or(0)
    }

    /// Checks all rules that do not depend on an endpoint.
    pub(crate) fn validate(&self, ram: &dyn GuestRam, chunks: Option<&dyn ChunkStore>) -> Result<(), ConfigError> {
        if self.page_size_mask == 0 {
            return Err(ConfigError::NoPageSize);
        }
        if self.input_range.is_empty() {
            return Err(ConfigError::EmptyRange("input_range"));
        }
        if self.domain_range.is_empty() {
            return Err(ConfigError::EmptyRange("domain_range"));
        }
        if self.msi_window.is_empty() {
            return Err(ConfigError::EmptyRange("msi_window"));
        }
        if self.limits.max_mappings == 0 {
            return Err(ConfigError::ZeroLimit("max_mappings"));
        }
        if self.limits.max_domains == 0 {
            return Err(ConfigError::ZeroLimit("max_domains"));
        }
        if self.limits.max_table_pages == 0 {
            return Err(ConfigError::ZeroLimit("max_table_pages"));
        }
        if !self.limits.max_step.is_power_of_two() || self.limits.max_step < self.granule() {
            return Err(ConfigError::Step(self.limits.max_step));
        }
        if self.limits.max_mapped_bytes == 0 {
            return Err(ConfigError::ZeroLimit("max_mapped_bytes"));
        }
        let size = self.probe_size;
        let fits = size as usize >= MIN_PROBE_SIZE && size <= MAX_PROBE_SIZE && size.is_multiple_of(8);
        if size != 0 && !fits {
            return Err(ConfigError::ProbeSize(size));
        }
        match (&self.window, chunks) {
            (None, None) => Ok(()),
            (Some(window), Some(chunks)) => self.validate_window(window, ram, chunks),
            _ => Err(ConfigError::WindowAndStore),
        }
    }

    fn validate_window(
        &self,
        window: &WindowConfig,
        ram: &dyn GuestRam,
        chunks: &dyn ChunkStore,
    ) -> Result<(), ConfigError> {
        let (chunk, region) = (chunks.chunk_size(), chunks.region_size());
        let granule = self.granule();
        if !chunk.is_power_of_two() || chunk < granule {
            return Err(ConfigError::ChunkSize { chunk, granule });
        }
        if region == 0 || region % chunk != 0 || region / chunk > 1 << 32 {
            return Err(ConfigError::RegionSize { region, chunk });
        }
        window.check_budget(window.budget, region)?;
        window.check_aperture(self, chunk, ram)
    }

    /// Checks that the engine can manage an endpoint whose mapper has these limits. `usable` contains the IOVAs that the endpoint can map,
    /// without the MSI window.
    pub(crate) fn check_endpoint(
        &self,
        id: EndpointId,
        limits: &MapperLimits,
        usable: &[RangeInclusive<u64>],
        aperture: Option<&RangeInclusive<u64>>,
    ) -> Result<(), ConfigError> {
        let host = limits.page_size_mask & limits.page_size_mask.wrapping_neg();
        let granule = self.granule();
        if host == 0 || host > granule {
            return Err(ConfigError::EndpointGranule { id, host, granule });
        }
        if usable.is_empty() {
            return Err(ConfigError::EndpointRange(id));
        }
        let Some(aperture) = aperture else {
            return Ok(());
        };
        let (start, end) = (*aperture.start(), *aperture.end());
        if usable.iter().any(|r| r.contains(&start) && r.contains(&end)) {
            Ok(())
        } else {
            Err(ConfigError::EndpointAperture { id, start, end })
        }
    }
}

impl WindowConfig {
    /// True if the aperture is above 4 GiB.
    pub(crate) fn is_high(&self) -> bool {
        *self.aperture.start() >= FOUR_GIB
    }

    /// Checks that the region is large enough for the budget.
    pub(crate) fn check_budget(&self, budget: u64, region: u64) -> Result<(), ConfigError> {
        if budget > region {
            return Err(ConfigError::Budget { budget, region });
        }
        Ok(())
    }

    fn check_aperture(&self, config: &EngineConfig, chunk: u64, ram: &dyn GuestRam) -> Result<(), ConfigError> {
        let (start, end) = (*self.aperture.start(), *self.aperture.end());
        let broken = |rule| Err(ConfigError::Aperture { start, end, rule });
        if self.aperture.is_empty() {
            return Err(ConfigError::EmptyRange("window.aperture"));
        }
        if start % chunk != 0 || end.wrapping_add(1) % chunk != 0 {
            return broken("must start and end at multiples of the chunk size");
        }
        let msi = &config.msi_window;
        if start < FOUR_GIB && (end >= FOUR_GIB || end >= *msi.start()) {
            return broken("must end below 4 GiB and below the MSI window, or start at 4 GiB or above");
        }
        if start <= *msi.end() && end >= *msi.start() {
            return broken("must not overlap the MSI window");
        }
        if start < *config.input_range.start() || end > *config.input_range.end() {
            return broken("must lie within input_range");
        }
        // Regions of guest RAM are far larger than chunks. So a region that overlaps the aperture covers the start or the end of at least
        // one chunk. This loop therefore checks only the start and the end of each chunk.
        let granule = config.granule();
        let is_ram = |gpa| ram.prefix(gpa, granule).is_some();
        let mut starts = (0..=(end - start) / chunk).map(|n| start + n * chunk);
        if starts.any(|gpa| is_ram(gpa) || is_ram(gpa + chunk - granule)) {
            return broken("must not overlap guest RAM");
        }
        Ok(())
    }
}
