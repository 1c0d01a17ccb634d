// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Modules of one crate, parsed from its source files: the definitions, imports and references of each module.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{
    Attribute, Expr, ExprUnsafe, Item, ItemForeignMod, ItemImpl, ItemMod, ItemUse, Lit, Macro, Meta, Safety, Signature,
    UseTree, Visibility,
};

use crate::unsafe_code::is_for_tests;

/// Index of a module in [`Crate::modules`].
pub(crate) type ModuleId = usize;

/// Names of a path, such as `["crate", "vfio", "DmaSpace"]`.
pub(crate) type Names = Vec<String>;

/// Module, inline or in its own file.
pub(crate) struct Module {
    pub(crate) parent: Option<ModuleId>,
    /// File that contains the module.
    pub(crate) file: PathBuf,
    pub(crate) children: HashMap<String, ModuleId>,
    /// Names that the module defines, except submodules.
    pub(crate) items: HashSet<String>,
    /// Imported names, each with the path of the imported item.
    pub(crate) imports: Vec<(String, Names)>,
    /// Paths whose names are all imported.
    pub(crate) globs: Vec<Names>,
    /// Paths in the module's code and its `use` items.
    pub(crate) references: Vec<Names>,
    /// True if the module exists only in tests.
    pub(crate) for_tests: bool,
    /// True if the module's code has unsafe blocks, functions, implementations or external blocks.
    pub(crate) has_unsafe: bool,
}

/// All modules of one crate. The first module is the root.
pub(crate) struct Crate {
    pub(crate) modules: Vec<Module>,
}

impl Crate {
    /// Reads the crate whose root is the file `root`, with all files that its `mod` items refer to.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let mut reader = Reader { modules: Vec::new(), current: 0, directory: directory_of(root), problem: None };
        reader.read_file(root, None, directory_of(root), false)?;
        Ok(Self { modules: reader.modules })
    }
}

fn directory_of(file: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new("")).to_path_buf()
}

/// Visitor that reads the modules of a crate one after another.
struct Reader {
    modules: Vec<Module>,
    current: ModuleId,
    /// Directory with the files of the current module's submodules.
    directory: PathBuf,
    /// First error. The error is stored here because the visitor's methods return nothing.
    problem: Option<anyhow::Error>,
}

impl Reader {
    fn read_file(
        &mut self,
        file: &Path,
        parent: Option<ModuleId>,
        directory: PathBuf,
        for_tests: bool,
    ) -> Result<ModuleId> {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let syntax = syn::parse_file(&text).with_context(|| format!("cannot parse {}", file.display()))?;
        let id = self.add(file.to_path_buf(), parent, directory, (&syntax.items, for_tests));
        self.problem.take().map_or(Ok(id), Err)
    }

    fn add(
        &mut self,
        file: PathBuf,
        parent: Option<ModuleId>,
        directory: PathBuf,
        (items, for_tests): (&[Item], bool),
    ) -> ModuleId {
        let id = self.modules.len();
        self.modules.push(Module {
            parent,
            file,
            children: HashMap::new(),
            items: items.iter().filter_map(name_of).collect(),
            imports: Vec::new(),
            globs: Vec::new(),
            references: Vec::new(),
            for_tests,
            has_unsafe: false,
        });
        let outer = (std::mem::replace(&mut self.current, id), std::mem::replace(&mut self.directory, directory));
        for item in items {
            self.visit_item(item);
        }
        (self.current, self.directory) = outer;
        id
    }

    fn module(&mut self) -> &mut Module {
        &mut self.modules[self.current]
    }

    /// Reads the module that `item` declares.
    fn declare(&mut self, item: &ItemMod) -> Result<()> {
        let name = plain(&item.ident);
        let directory = self.directory.join(&name);
        let parent = Some(self.current);
        let for_tests = self.module().for_tests || is_for_tests(&item.attrs);
        let id = if let Some((_, items)) = &item.content {
            let file = self.module().file.clone();
            self.add(file, parent, directory, (items, for_tests))
        } else if let Some(path) = path_attribute(&item.attrs) {
            let file = directory_of(&self.module().file).join(path);
            self.read_file(&file, parent, directory_of(&file), for_tests)?
        } else {
            let candidates = [self.directory.join(format!("{name}.rs")), directory.join("mod.rs")];
            let Some(file) = candidates.iter().find(|file| file.exists()) else {
                bail!("{}: module {name} has no file", self.module().file.display());
            };
            self.read_file(file, parent, directory, for_tests)?
        };
        self.module().children.insert(name, id);
        Ok(())
    }

    fn import(&mut self, tree: &UseTree, mut path: Names) {
        match tree {
            UseTree::Path(part) => {
                path.push(plain(&part.ident));
                self.import(&part.tree, path);
            }
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(tree, path.clone())),
            UseTree::Glob(_) => self.module().globs.push(path),
            UseTree::Name(name) => self.import_as(&plain(&name.ident), plain(&name.ident), path),
            UseTree::Rename(name) => self.import_as(&plain(&name.ident), plain(&name.rename), path),
        }
    }

    /// Imports `name` of `path` as `alias`.
    fn import_as(&mut self, name: &str, mut alias: String, mut path: Names) {
        if name != "self" {
            path.push(name.to_string());
        } else if alias == "self" {
            alias = path.last().cloned().unwrap_or_default();
        }
        self.module().references.push(path.clone());
        self.module().imports.push((alias, path));
    }

    /// Records the paths among the tokens of a macro call. The tokens are not parsed as syntax.
    fn scan(&mut self, tokens: TokenStream) {
        let mut path = Names::new();
        // Number of colons since the last name.
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    self.module().has_unsafe |= name == "unsafe";
                    if colons != 2 {
                        self.note(std::mem::take(&mut path));
                    }
                    path.push(plain(&name));
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' && !path.is_empty() => colons += 1,
                token => {
                    self.note(std::mem::take(&mut path));
                    colons = 0;
                    if let TokenTree::Group(group) = token {
                        self.scan(group.stream());
                    }
                }
            }
        }
        self.note(path);
    }

    fn note(&mut self, path: Names) {
        if !path.is_empty() {
            self.module().references.push(path);
        }
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if let Err(error) = self.declare(item) {
            self.problem.get_or_insert(error);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() {
            self.import(&item.tree, Names::new());
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.note(path.segments.iter().map(|segment| plain(&segment.ident)).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_expr_unsafe(&mut self, block: &'ast ExprUnsafe) {
        self.module().has_unsafe = true;
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_signature(&mut self, signature: &'ast Signature) {
        self.module().has_unsafe |= matches!(signature.safety, Safety::Unsafe(_));
        visit::visit_signature(self, signature);
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        self.module().has_unsafe |= item.unsafety.is_some();
        visit::visit_item_impl(self, item);
    }

    fn visit_item_foreign_mod(&mut self, item: &'ast ItemForeignMod) {
        self.module().has_unsafe = true;
        visit::visit_item_foreign_mod(self, item);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.visit_path(&call.path);
        self.scan(call.tokens.clone());
    }

    // Attributes and visibilities import nothing.
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// Returns the name without the `r#` of a raw identifier.
fn plain(name: &proc_macro2::Ident) -> String {
    name.to_string().trim_start_matches("r#").to_string()
}

/// Returns the name that an item defines in its module.
fn name_of(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::ExternCrate(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(plain(name))
}

/// Returns the value of `#[path = "…"]`.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    })
}
