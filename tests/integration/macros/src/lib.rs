// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Attribute for tests with real guests.

use proc_macro::TokenStream;
use proc_macro2::TokenStream as Tokens;
use quote::quote;
use syn::ext::IdentExt;
use syn::meta::ParseNestedMeta;
use syn::parse::Parser;
use syn::{Ident, ItemFn, LitStr, Result};

/// Registers a function as a test of `carom_integration::harness`. The attribute's arguments say when the test runs:
///
/// - `needs(Usb, Edu)`: only if the machine meets all these requirements, which are variants of
///   `carom_integration::harness::Need`.
/// - `slow = "reason"`: only if the user requests slow tests. The reason says, for example, which other tests cover most of this
///   test.
/// - `by_iommufd`: twice. The test runs once without IOMMUFD, like all tests, and later once more with IOMMUFD.
#[proc_macro_attribute]
pub fn guest_test(attributes: TokenStream, item: TokenStream) -> TokenStream {
    expand(attributes.into(), item.into()).unwrap_or_else(|error| error.into_compile_error()).into()
}

#[derive(Default)]
struct Attributes {
    needs: Vec<Ident>,
    slow: Option<LitStr>,
    by_iommufd: bool,
}

impl Attributes {
    fn take(&mut self, meta: &ParseNestedMeta) -> Result<()> {
        if meta.path.is_ident("needs") {
            return meta.parse_nested_meta(|need| {
                self.needs.push(need.path.require_ident()?.unraw());
                Ok(())
            });
        }
        if meta.path.is_ident("slow") {
            self.slow = Some(meta.value()?.parse()?);
        } else if meta.path.is_ident("by_iommufd") {
            self.by_iommufd = true;
        } else {
            return Err(meta.error("expected `needs(…)`, `slow = \"reason\"` or `by_iommufd`"));
        }
        Ok(())
    }
}

fn expand(attributes: Tokens, item: Tokens) -> Result<Tokens> {
    let function: ItemFn = syn::parse2(item)?;
    let mut parsed = Attributes::default();
    syn::meta::parser(|meta| parsed.take(&meta)).parse2(attributes)?;
    let Attributes { needs, slow, by_iommufd } = parsed;
    let run = &function.sig.ident;
    let name = run.to_string();
    let slow = slow.map_or(quote!(None), |reason| quote!(Some(#reason)));
    Ok(quote! {
        #function

        ::carom_integration::harness::inventory::submit! {
            ::carom_integration::harness::GuestTest {
                module: module_path!(),
                function: #name,
                needs: &[#(::carom_integration::harness::Need::#needs),*],
                slow: #slow,
                by_iommufd: #by_iommufd,
                run: #run,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(attributes: Tokens) -> Result<String> {
        expand(
            attributes,
            quote!(
                fn works() {}
            ),
        )
        .map(|tokens| tokens.to_string().replace(' ', ""))
    }

    #[test]
    fn function_stays_and_is_registered_with_its_attributes() {
        let text = expanded(quote!(needs(Usb, Edu), slow = "others do", by_iommufd)).unwrap();
        for part in [
            "fnworks(){}",
            "function:\"works\"",
            "needs:&[::carom_integration::harness::Need::Usb,::carom_integration::harness::Need::Edu]",
            "slow:Some(\"othersdo\")",
            "by_iommufd:true",
            "run:works",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn test_without_attributes_needs_nothing_and_always_runs() {
        let text = expanded(quote!()).unwrap();
        assert!(text.contains("needs:&[],slow:None,by_iommufd:false"), "{text}");
    }

    #[test]
    fn unknown_attributes_and_wrong_forms_are_refused() {
        for wrong in [quote!(ignored), quote!(slow), quote!(needs = "Usb"), quote!(needs(a::b)), quote!(slow = 3)] {
            assert!(expanded(wrong.clone()).is_err(), "{wrong}");
        }
        assert!(
            expand(
                quote!(),
                quote!(
                    struct Other;
                )
            )
            .is_err()
        );
    }
}
