// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Events of the model test: requests, other events of the device, and failures of the host.

use std::ops::Range;

use iommu_bounce::test_utils as encode;
use proptest::prelude::*;

use crate::setup::{CHUNK, ENDPOINTS, FIRST_IOVA, PAGE};

/// Request or other event. IOVAs are page numbers, counted from [`FIRST_IOVA`].
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Attach {
        endpoint: u32,
        domain: u32,
        bypass: bool,
    },
    Detach {
        endpoint: u32,
        domain: u32,
    },
    Map(Map),
    /// MAP_LIST. Each range has a first page and a number of pages.
    MapList {
        domain: u32,
        start: u64,
        flags: u32,
        ranges: Vec<(u64, u64)>,
    },
    Unmap {
        domain: u32,
        start: u64,
        pages: u64,
    },
    /// UNMAPs that are served together. Each UNMAP has a domain, a first page and a number of pages.
    Unmaps(Vec<(u32, u64, u64)>),
    Probe {
        endpoint: u32,
    },
    WindowAdd {
        domain: u32,
        page: u64,
        flags: u32,
    },
    WindowDel {
        domain: u32,
        page: u64,
    },
    Truncated {
        op: Box<Op>,
        len: prop::sample::Index,
    },
    Reset {
        features: u64,
    },
    /// Reset of the whole VM, followed by the actions of [`Reset`](Self::Reset).
    SystemReset {
        features: u64,
    },
    WriteBypass {
        value: u8,
    },
    SetBudget {
        chunks: u64,
    },
    /// Sets the cap on mapped bytes. `None` removes the cap.
    SetMaxMapped {
        pages: Option<u64>,
    },
    /// Adds an endpoint, unless it already exists.
    Plug {
        endpoint: u32,
    },
    /// Removes an endpoint, if it exists.
    Unplug {
        endpoint: u32,
    },
    /// Hides the device's registers and the file from the guest, or makes them visible if `shown` is true. In both cases, revokes this
    /// memory from the engine.
    ShowDevice {
        shown: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Map {
    pub(crate) domain: u32,
    pub(crate) start: u64,
    pub(crate) pages: u64,
    pub(crate) gpa_page: u64,
    pub(crate) flags: u32,
    /// Numbers of bytes to add to the first IOVA, the last IOVA and the guest-physical address, so that they are not aligned. Mostly 0.
    pub(crate) skew: [u64; 3],
}

impl Map {
    /// Returns the first IOVA, the last IOVA and the guest-physical address.
    pub(crate) fn bytes(&self) -> (u64, u64, u64) {
        let start = FIRST_IOVA + self.start * PAGE;
        let last = start + self.pages * PAGE - 1;
        let gpa = self.gpa_page * PAGE;
        let [a, b, c] = self.skew;
        (start + a, last.wrapping_add(b), gpa + c)
    }
}

impl Op {
    /// True for a MAP_LIST, even for a truncated one.
    pub(crate) fn is_list(&self) -> bool {
        match self {
            Self::MapList { .. } => true,
            Self::Truncated { op, .. } => op.is_list(),
            _ => false,
        }
    }

    /// Returns the device-readable part of the request, or `None` if the event is not a request.
    pub(crate) fn request(&self) -> Option<Vec<u8>> {
        let iova = |page: u64| FIRST_IOVA + page * PAGE;
        Some(match self {
            Self::Attach { endpoint, domain, bypass: false } => encode::attach(*endpoint, *domain),
            Self::Attach { endpoint, domain, bypass: true } => encode::attach_bypass(*endpoint, *domain),
            Self::Detach { endpoint, domain } => encode::detach(*endpoint, *domain),
            Self::Map(map) => {
                let (start, last, gpa) = map.bytes();
                encode::map(map.domain, start, last, gpa, map.flags)
            }
            Self::MapList { domain, start, flags, ranges } => {
                let ranges: Vec<_> = ranges.iter().map(|(gpa, pages)| (gpa * PAGE, pages * PAGE)).collect();
                encode::map_list(*domain, iova(*start), *flags, &ranges)
            }
            Self::Unmap { domain, start, pages } => encode::unmap(*domain, iova(*start), iova(*start + *pages) - 1),
            Self::Probe { endpoint } => encode::probe(*endpoint),
            Self::WindowAdd { domain, page, flags } => encode::window_add(*domain, *flags, iova(*page)),
            Self::WindowDel { domain, page } => encode::window_del(*domain, iova(*page)),
            Self::Truncated { op, len } => {
                let mut bytes = op.request()?;
                bytes.truncate(1 + len.index(bytes.len() - 1));
                bytes
            }
            Self::Reset { .. }
            | Self::SystemReset { .. }
            | Self::WriteBypass { .. }
            | Self::SetBudget { .. }
            | Self::SetMaxMapped { .. }
            | Self::Unmaps(_)
            | Self::ShowDevice { .. }
            | Self::Plug { .. }
            | Self::Unplug { .. } => return None,
        })
    }
}

fn domain() -> impl Strategy<Value = u32> {
    // Domain numbers 0 and 5 are out of range.
    prop_oneof![6 => Just(1), 6 => 1u32..=3, 1 => Just(0), 1 => Just(5)]
}

fn endpoint() -> impl Strategy<Value = u32> {
    // Endpoint 9 does not exist.
    prop_oneof![12 => ENDPOINTS, 1 => Just(9)]
}

fn flags() -> impl Strategy<Value = u32> {
    prop_oneof![12 => 1u32..=3, 1 => Just(0), 1 => Just(4), 1 => Just(11)]
}

fn skew() -> impl Strategy<Value = [u64; 3]> {
    prop_oneof![
        16 => Just([0; 3]),
        1 => Just([1, 0, 0]),
        1 => Just([0, 0x10, 0]),
        1 => Just([0, 0, 0x800]),
    ]
}

/// Generates a page, mostly the start of a chunk in the aperture.
fn chunk_page() -> impl Strategy<Value = u64> {
    let chunks = (0u64..6).prop_map(|n| 8 + n * (CHUNK / PAGE));
    prop_oneof![12 => chunks, 1 => 0u64..40]
}

fn map() -> impl Strategy<Value = Map> {
    let ram = (0u64..44, flags());
    let device = (39u64..50, 1u32..8);
    let what = prop_oneof![8 => ram, 4 => device];
    (domain(), 0u64..40, 1u64..5, what, skew()).prop_map(|(domain, start, pages, (gpa_page, flags), skew)| Map {
        domain,
        start,
        pages,
        gpa_page,
        flags,
        skew,
    })
}

fn map_list() -> impl Strategy<Value = Op> {
    let ranges = |pages: Range<u64>| prop::collection::vec((pages, 0u64..4), 0..5);
    let what = prop_oneof![6 => (ranges(0..44), flags()), 3 => (ranges(36..50), 1u32..8)];
    (domain(), 0u64..40, what).prop_map(|(domain, start, (ranges, flags))| Op::MapList { domain, start, flags, ranges })
}

/// Generates UNMAPs that are served together. Most are adjacent, in any order.
fn unmaps() -> impl Strategy<Value = Vec<(u32, u64, u64)>> {
    let anywhere = prop::collection::vec((domain(), 0u64..40, 1u64..8), 1..6);
    let neighbours = || {
        (domain(), 0u64..30, prop::collection::vec(1u64..5, 2..8)).prop_map(|(domain, start, counts)| {
            let mut at = start;
            let follow = counts.into_iter().map(|pages| {
                at += pages;
                (domain, at - pages, pages)
            });
            follow.collect::<Vec<_>>()
        })
    };
    prop_oneof![1 => anywhere, 2 => neighbours(), 2 => neighbours().prop_shuffle()]
}

fn request() -> impl Strategy<Value = Op> {
    let pair = || (endpoint(), domain());
    prop_oneof![
        4 => (pair(), prop::bool::weighted(0.15))
            .prop_map(|((endpoint, domain), bypass)| Op::Attach { endpoint, domain, bypass }),
        2 => pair().prop_map(|(endpoint, domain)| Op::Detach { endpoint, domain }),
        8 => map().prop_map(Op::Map),
        3 => map_list(),
        5 => (domain(), 0u64..40, 1u64..12)
            .prop_map(|(domain, start, pages)| Op::Unmap { domain, start, pages }),
        1 => endpoint().prop_map(|endpoint| Op::Probe { endpoint }),
        5 => (domain(), chunk_page(), flags())
            .prop_map(|(domain, page, flags)| Op::WindowAdd { domain, page, flags }),
        3 => (domain(), chunk_page()).prop_map(|(domain, page)| Op::WindowDel { domain, page }),
    ]
}

/// Generates any event.
pub(crate) fn any_op() -> impl Strategy<Value = Op> {
    let truncated = (request(), any::<prop::sample::Index>()).prop_map(|(op, len)| {
        let op = Box::new(op);
        Op::Truncated { op, len }
    });
    let features = || prop_oneof![5 => Just(u64::MAX), 1 => Just(!(1 << 22 | 1 << 23)), 1 => Just(!(1 << 21)), 1 => Just(!(1 << 2)), 1 => Just(!(1 << 5)), 1 => Just(!(1 << 6))];
    prop_oneof![
        40 => request(),
        6 => unmaps().prop_map(Op::Unmaps),
        2 => truncated,
        1 => features().prop_map(|features| Op::Reset { features }),
        1 => features().prop_map(|features| Op::SystemReset { features }),
        1 => (0u8..=2).prop_map(|value| Op::WriteBypass { value }),
        2 => (0u64..=5).prop_map(|chunks| Op::SetBudget { chunks }),
        2 => prop::option::weighted(0.8, 1u64..=60).prop_map(|pages| Op::SetMaxMapped { pages }),
        2 => ENDPOINTS.prop_map(|endpoint| Op::Plug { endpoint }),
        2 => ENDPOINTS.prop_map(|endpoint| Op::Unplug { endpoint }),
        2 => any::<bool>().prop_map(|shown| Op::ShowDevice { shown }),
    ]
}

/// Failure of the host at the next request.
#[derive(Clone, Debug)]
pub(crate) enum HostFailure {
    Map { endpoint: u32, after: u32 },
    Exhausted { endpoint: u32, after: u32 },
    Adopt { after: u32 },
    Back,
    BackExhausted,
    Release,
    Unmap { endpoint: u32, after: u32 },
    AllUnmaps { endpoint: u32 },
    Healed,
}

/// Generates failures that the engine can undo.
pub(crate) fn map_failure() -> impl Strategy<Value = HostFailure> {
    let call = || (ENDPOINTS, 0u32..4);
    prop_oneof![
        4 => call().prop_map(|(endpoint, after)| HostFailure::Map { endpoint, after }),
        4 => call().prop_map(|(endpoint, after)| HostFailure::Exhausted { endpoint, after }),
        2 => (0u32..2).prop_map(|after| HostFailure::Adopt { after }),
        1 => Just(HostFailure::Back),
        1 => Just(HostFailure::BackExhausted),
    ]
}

/// Generates failures of any kind. A failure stays armed until it occurs or is cancelled.
pub(crate) fn unmap_failure() -> impl Strategy<Value = HostFailure> {
    let call = || (ENDPOINTS, 0u32..4);
    prop_oneof![
        4 => map_failure(),
        4 => call().prop_map(|(endpoint, after)| HostFailure::Unmap { endpoint, after }),
        2 => ENDPOINTS.prop_map(|endpoint| HostFailure::AllUnmaps { endpoint }),
        1 => Just(HostFailure::Release),
        2 => Just(HostFailure::Healed),
    ]
}
