/* Names of attributes, as objects that are made once, and where objects of a type have them. */

#ifndef DIST2_NAMES_H
#define DIST2_NAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <structmember.h>

/* A name, and where its object is kept. */
typedef struct {
    PyObject **name;
    const char *text;
} Name;

/* Make names; -1 with an exception. */
static inline int
intern(const Name *names, size_t count)
{
    for (size_t each = 0; each < count; each++) {
        *names[each].name = PyUnicode_InternFromString(names[each].text);
        if (*names[each].name == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Find where objects of a type have an attribute of a kind (T_OBJECT_EX: a slot), counted from where they begin; -1
   if it is none that C can read there. */
static inline Py_ssize_t
member_offset(PyTypeObject *type, PyObject *name, int kind)
{
    PyObject *member = PyObject_GetAttr((PyObject *)type, name);
    Py_ssize_t offset = -1;
    if (member == NULL) {
        PyErr_Clear();
    }
    else if (Py_IS_TYPE(member, &PyMemberDescr_Type)) {
        const PyMemberDef *definition = ((PyMemberDescrObject *)member)->d_member;
        offset = definition->type == kind ? definition->offset : -1;
    }
    Py_XDECREF(member);
    return offset;
}

/* Read an attribute that lies at such an offset, where that is known and it is set. */
static inline PyObject *
read_attribute(PyObject *object, PyObject *name, Py_ssize_t offset)
{
    PyObject *there = offset < 0 ? NULL : *(PyObject **)((char *)object + offset);
    return there != NULL ? Py_NewRef(there) : PyObject_GetAttr(object, name);
}

#endif
