// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Responses before they are converted to HTTP.

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::ext::ReasonPhrase;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

/// Response before it is converted to HTTP.
#[derive(Clone, Debug)]
pub(super) struct Page {
    pub(super) status: StatusCode,
    /// Media type of the body, if there is a body.
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
        // Cloud Hypervisor's clients parse everything after the HTTP version as the status number. So the reason phrase is empty, as in
        // Cloud Hypervisor's responses.
        response.extensions_mut().insert(ReasonPhrase::from_static(b""));
        if let Some(media_type) = page.media_type {
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        }
        response
    }
}
