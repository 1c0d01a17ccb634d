// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Resolution of a path to the module that defines the last name of the path. The resolution follows the Rust reference ("Paths", "Use
//! declarations") as far as needed to find modules.

use std::collections::HashSet;

use crate::source::{Crate, ModuleId};

/// Target of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Definition {
    Module(ModuleId),
    /// Item with this name in this module.
    Item(ModuleId, String),
}

/// Resolves `path` from `module`. Returns `None` if the path does not lead to this crate.
pub(crate) fn resolve(krate: &Crate, module: ModuleId, path: &[String]) -> Option<Definition> {
    Search { krate, under_way: HashSet::new() }.path(module, path)
}

struct Search<'a> {
    krate: &'a Crate,
    /// Names that are currently being resolved. Imports can be circular, so the search skips these names.
    under_way: HashSet<(ModuleId, String)>,
}

impl Search<'_> {
    fn path(&mut self, module: ModuleId, path: &[String]) -> Option<Definition> {
        let (first, mut rest) = path.split_first()?;
        let mut found = match first.as_str() {
            "crate" => Definition::Module(0),
            "self" => Definition::Module(module),
            "super" => Definition::Module(self.krate.modules[module].parent?),
            name => self.name(module, name, rest.is_empty())?,
        };
        while let (Definition::Module(at), Some((name, more))) = (&found, rest.split_first()) {
            found = match name.as_str() {
                "super" => Definition::Module(self.krate.modules[*at].parent?),
                name => self.name(*at, name, more.is_empty())?,
            };
            rest = more;
        }
        Some(found)
    }

    /// Resolves `name` in `module`. At the end of a path, an item takes precedence over a module of the same name. Elsewhere in a path, the
    /// module takes precedence.
    fn name(&mut self, module: ModuleId, name: &str, is_last: bool) -> Option<Definition> {
        if !self.under_way.insert((module, name.to_string())) {
            return None;
        }
        let at = &self.krate.modules[module];
        let item = at.items.contains(name).then(|| Definition::Item(module, name.to_string()));
        let child = at.children.get(name).map(|id| Definition::Module(*id));
        let own = if is_last { item.or(child) } else { child.or(item) };
        let found = own.or_else(|| self.imported(module, name)).or_else(|| {
            at.globs.iter().find_map(|glob| match self.path(module, glob)? {
                Definition::Module(source) => self.name(source, name, is_last),
                Definition::Item(..) => None,
            })
        });
        self.under_way.remove(&(module, name.to_string()));
        found
    }

    fn imported(&mut self, module: ModuleId, name: &str) -> Option<Definition> {
        let imports = &self.krate.modules[module].imports;
        imports.iter().filter(|(alias, _)| alias == name).find_map(|(_, path)| self.path(module, path))
    }
}
