// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Responses before they are put in HTTP.

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::ext::ReasonPhrase;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

/// A response before it is put in HTTP.
#[derive(Clone, Debug)]
pub(super) struct Page {
    pub(super) status: StatusCode,
    /// Of the body, if there is one.
    pub(super) media_type: Option<&'static str>,
    pub(super) body: Bytes,
}

impl Page {
    pub(super) fn new(status: StatusCode, media_type: &'static str, body: impl Into<Bytes>) -> Self {
        Self { status, media_type: Some(media_type), body: body.into() }
    }
}

impl From<Page> for Response<Full<Bytes>> {
    fn from(page: Page) -> Self {
        let mut response = Self::new(Full::new(page.body));
        *response.status_mut() = page.status;
        // As in Cloud Hypervisor, whose clients take all that follows the version for the number.
        response.extensions_mut().insert(ReasonPhrase::from_static(b""));
        if let Some(media_type) = page.media_type {
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        }
        response
    }
}
